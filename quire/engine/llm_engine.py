# SPDX-License-Identifier: Apache-2.0
"""Synchronous engine with what it offers beside requests and `step`.

Adapters, sleep, new weights, profiles and explanations. `SyncEngine` has requests and steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.adapters import LoRARequest
from quire.config import EngineArgs
from quire.engine.client import HeldInterrupts
from quire.engine.front_end import decode_explanations
from quire.engine.messages import CoreReady
from quire.engine.sleep_state import check_level, check_mode, check_tags
from quire.engine.sync_engine import SyncEngine
from quire.errors import QuireError, ValidationError
from quire.features import WEIGHT_UPDATES
from quire.metrics.stats import StatLogger
from quire.plugins import import_place
from quire.scheduler.explain import Explanation
from quire.vllm_names.members import missing_member
from quire.vllm_names.parameters import with_vllm_keywords

T = TypeVar("T")


class LLMEngine(SyncEngine):
    """Synchronous engine; the core runs in this process unless `in_process=False`, replicas in their own.

    Raises:
        StartupError: the engine cannot start; the message says why.
        ConflictError: from any method while another thread is in one; use `AsyncLLM` for several callers.
    """

    @staticmethod
    @with_vllm_keywords("LLMEngine.from_engine_args")
    def from_engine_args(engine_args: EngineArgs) -> LLMEngine:
        """Build from flat arguments."""
        return LLMEngine(engine_args.create_engine_config())

    @property
    def core_ready(self) -> CoreReady:
        """Ready message of the first core."""
        ready = self._front_end.core_ready
        assert ready is not None
        return ready

    def get_num_unfinished_requests(self) -> int:
        return len(self._front_end)

    def add_stat_logger(self, logger: StatLogger) -> None:
        """Notify `logger` of engine events from now on, and of the cores that are ready."""
        self._front_end.stat_loggers.add(logger)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; False, and nothing done, on a core that is running requests."""
        return all(self._call_each("reset_prefix_cache"))

    def reset_encoder_cache(self) -> bool:
        """Drop the embeddings of media that no request uses; False if some are in use and stay."""
        return all(self._call_each("reset_encoder_cache"))

    def start_profile(self) -> None:
        """Start a profile of every core; see `AsyncLLM.start_profile`."""
        self.config.observability.require_profiler()
        self._call_each("start_profile")

    def stop_profile(self) -> list[str]:
        """End the profiles, and return the paths of their files; see `AsyncLLM.stop_profile`."""
        self.config.observability.require_profiler()
        return self._call_each("stop_profile")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter in advance; see `AsyncLLM.add_lora`.

        Raises:
            ValidationError: it cannot be used; names the file, the tensor and the limit.
        """
        self.input_processor.tokenizers.of(lora_request)
        fields = msgspec.to_builtins(self._front_end.completed_adapter(lora_request))
        return all(self._call_each("add_lora", fields))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter once no request uses it; see `AsyncLLM.remove_lora`."""
        return any(self._call_each("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of the adapters in host memory."""
        return {number for numbers in self._call_each("list_loras") for number in numbers}

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Suspend and free memory until `wake_up`; see `AsyncLLM.sleep`. Outputs come with the next `step`.

        Raises:
            ValidationError: there is no such level or mode.
        """
        level, mode = check_level(level), check_mode(mode)
        if mode == "abort":
            self.abort_request(self._front_end.labels())
        outputs: list[Any] = []
        while mode == "wait" and self.has_unfinished_requests():
            outputs += self.step()
        with self._one_thread, HeldInterrupts():
            self._outputs[:0] = outputs
            answers, messages = self._front_end.sleep(level)
            self._send(messages)
            self._await(answers)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake everything, or these tags; see `AsyncLLM.wake_up`, also for errors."""
        wanted = check_tags(tags)
        with self._one_thread, HeldInterrupts():
            rest, answers, messages = self._front_end.wake_up(wanted)
            self._send(messages)
            self._await(answers)
            self._front_end.rest = rest

    @functools.cached_property
    def weights(self) -> Any:
        """Updates of the weights (`quire.training.updates.WeightUpdates`)."""
        return import_place(WEIGHT_UPDATES["offline"])(self)

    @property
    def weight_version(self) -> str:
        """Version of the weights in use."""
        return self._front_end.rest.weight_version

    def note_weight_update(self, outcome: str, seconds: float) -> None:
        """Count a weight update (see `StatLogger.weights_updated`)."""
        self._front_end.stat_loggers.weights_updated(outcome, seconds)

    def rename_weights(self, version: str) -> None:
        """Set the version of the weights in use."""
        self._front_end.rest = replace(self._front_end.rest, weight_version=version)

    def replace_weights(self, model_dir: str, version: str, *, keeps_cache: bool = False) -> None:
        """Use the weights of another directory, in all cores or in none; the engine sleeps at level 0.

        Args:
            keeps_cache: whether running requests keep what the old weights have computed; else they compute it again.

        Raises:
            ValidationError: they do not fit the model, or the engine does not sleep; the old ones stay.
        """
        try:
            self._call_each("prepare_weights", model_dir)
        except QuireError:
            if self._front_end.dead_error is None:
                self._call_each("drop_weights")
            raise
        self._call_each("commit_weights", model_dir, keeps_cache)
        self.rename_weights(version)

    def call_cores(self, method: str, *args: Any) -> list[Any]:
        """Call a utility of every core, one after the other, and return the results."""
        return self._call_each(method, *args)

    def explain(self, request_id: str) -> list[Explanation]:
        """Return the explanations of a request's waiting, one per sequence; `print` one to read it.

        Raises:
            NotFoundError: it is unknown, or it ended too long ago.
        """
        sequences = self._front_end.locate_sequences(request_id)
        return decode_explanations(
            [self._call(core, "explain", name) for core, name in sequences], request_id
        )

    def call_core(self, method: str, *args: Any) -> Any:
        """Call a utility of the first core and wait for its result."""
        return self._call(0, method, *args)

    def _close_features(self) -> None:
        if "weights" in vars(self):
            self.weights.close()

    def run_on_worker(self, function: Callable[[Any], T]) -> T:
        """Call `function(worker)` between steps and return its result; an exception of it is raised here.

        Raises:
            ValidationError: the worker is in another process.
        """
        if self.config.parallel.num_replicas > 1:
            raise ValidationError("replicas run in other processes, where no function can be called")
        done: Future[T] = Future()

        def run(worker: Any) -> None:
            try:
                done.set_result(function(worker))
            except Exception as error:  # raised to the caller
                done.set_exception(error)

        self.call_core("run_on_worker", run)
        return done.result()

    def _call(self, core: int, method: str, *args: Any) -> Any:
        with self._one_thread, HeldInterrupts():
            answer, messages = self._front_end.call(core, method, *args)
            self._send(messages)
            while not answer.done():
                self._receive(core)
        return answer.result()

    def _call_each(self, method: str, *args: Any) -> list[Any]:
        return [self._call(core, method, *args) for core in range(len(self._clients))]

    def _await(self, answers: Sequence[Future[Any]]) -> None:
        """Wait for an answer of each core."""
        for core, answer in enumerate(answers):
            while not answer.done():
                self._receive(core)
        for answer in answers:
            answer.result()

    if not TYPE_CHECKING:
        __getattr__ = missing_member("LLMEngine")
