# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engine with what it offers beside requests that generate.

Pooling, adapters, sleep, new weights, profiles, explanations, and what several API processes exchange. `AsyncEngine`
has the loop and `generate`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.adapters import LoRARequest
from quire.config import EngineArgs, EngineConfig, ModelConfig
from quire.engine.admission import Admission
from quire.engine.async_engine import AsyncEngine
from quire.engine.cores import CoreWatcher
from quire.engine.front_end import FrontEnd, Outgoing, decode_explanations
from quire.engine.messages import Detach
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import SharedWaiting
from quire.engine.shared_counters import CounterSlot
from quire.engine.sleep_control import OtherFrontEnds
from quire.engine.sleep_state import EngineSleepState
from quire.engine.tokenizer import Tokenizer
from quire.errors import EngineDeadError, ValidationError
from quire.features import POOLED_OUTPUTS, WEIGHT_UPDATES
from quire.inputs import PromptType
from quire.metrics.stats import StatLogger
from quire.plugins import import_place
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import DEFAULT_TEXT_OPTIONS, PoolingParams, TextOptions
from quire.sampling_params import SamplingParams
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats
from quire.vllm_names.members import missing_member
from quire.vllm_names.parameters import with_vllm_keywords


@dataclass(frozen=True)
class FrontEndAccess:
    """Front end of an asynchronous engine as features reach it, in the event loop's thread.

    Attributes:
        tokenize: tokenizes a prompt, for an adapter and with options.
        send: sends messages to cores.
        expire: ends the requests whose deadlines have passed, and sets the timer for the next one.
    """

    front_end: FrontEnd
    admission: Admission
    tokenize: Callable[[PromptType, LoRARequest | None, TextOptions], Awaitable[TokenizedPrompt]]
    send: Callable[[list[Outgoing]], None]
    expire: Callable[[], None]


class AsyncLLM(AsyncEngine):
    """Asynchronous engine. Construction starts the cores and returns at once; `wait_ready` waits for them.

    With `cores`, it is one of several front ends of these, and starts none of its own.

    Raises:
        StartupError: from the constructor for errors detected immediately (no such model, bad option, no tokenizer),
            from `wait_ready` for errors of a core.
    """

    @staticmethod
    def start(config: EngineConfig) -> AsyncLLM:
        """Start the core and return without waiting for it."""
        return AsyncLLM(config)

    @staticmethod
    @with_vllm_keywords("AsyncLLM.from_engine_args")
    def from_engine_args(engine_args: EngineArgs) -> AsyncLLM:
        """Start from flat arguments."""
        return AsyncLLM(engine_args.create_engine_config())

    @property
    def loading(self) -> Any:
        """Stage of the first core that loads (`quire.engine.core_progress.LoadingState`); None: unknown, or
        none loads."""
        return next((state for client in self._clients if (state := client.loading) is not None), None)

    @property
    def stalls(self) -> bool:
        """True if a core has loaded and every loaded core seems to hang."""
        return self._front_end.stalls

    async def check_constraint(self, params: SamplingParams) -> None:
        """Check that the constraint of the parameters can be enforced; the result is cached for `generate`.

        Raises:
            ValidationError: it cannot.
            UnavailableError: all checkers are busy.
        """
        await self.input_processor.constraints.validated_async(params)

    async def encode(
        self, prompt: PromptType, pooling_params: PoolingParams, request_id: str, **terms: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the pooled output of a prompt; closing the generator before aborts the request.

        `terms` are the keywords of `encode_all`, which documents the errors.
        """
        (output,) = await self.encode_all([prompt], pooling_params, [request_id], **terms)
        yield output

    async def encode_all(
        self,
        prompts: Sequence[PromptType],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each prompt, in order; each is a request of its own, with a label of its own.

        `options` control tokenization; `tokenization_kwargs` are the same under vLLM's names and override them.

        Two batches of prompts are in the engine at a time, so that many prompts of one caller leave room for others
        between them. Cancelling aborts the rest.

        Raises:
            ValidationError: a prompt or parameter is invalid.
            UnavailableError: the queue is full, or the engine sleeps.
            DeadlineError: `timeout_s` is over; EngineError: a prompt failed, or was aborted, or the engine died.
        """
        terms: dict[str, Any] = {"priority": priority, "tenant": tenant, "timeout_s": timeout_s}
        terms |= {"trace_headers": trace_headers, "arrived": self._front_end.clock()}
        terms |= {"adapter_request": lora_request, "data_parallel_rank": data_parallel_rank}
        self._receivers.ensure()
        await self.check_health()
        options = options.with_kwargs(tokenization_kwargs)
        pool: Callable[..., Awaitable[list[PoolingRequestOutput[PoolingOutput]]]]
        pool = import_place(POOLED_OUTPUTS)
        access = FrontEndAccess(self._front_end, self._admission, self._tokenize, self._send, self._expire)
        return await pool(access, prompts, pooling_params, request_ids, options, terms)

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; False, and nothing done, on a core that is running requests."""
        return all(await self._call_each("reset_prefix_cache"))

    async def reset_encoder_cache(self) -> bool:
        """Drop the embeddings of media that no request uses; False if some are in use and stay."""
        return all(await self._call_each("reset_encoder_cache"))

    async def start_profile(self) -> None:
        """Start a profile of every core's worker.

        Raises:
            ValidationError: the engine has no `profiler_config`, or several ranks, or a profile is running.
        """
        self.config.observability.require_profiler()
        await self._call_each("start_profile")

    async def stop_profile(self) -> list[str]:
        """End the profiles, and return the paths of their files, on the cores' host.

        Raises:
            ValidationError: no profile is running, or a file cannot be written; else as `start_profile`.
        """
        self.config.observability.require_profiler()
        return await self._call_each("stop_profile")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter in advance, beside the steps; true when every core has it.

        A restarted core loads it again with the first request that uses it.

        Raises:
            ValidationError: it cannot be used; names the file, the tensor and the limit.
        """
        await self.get_tokenizer_context(lora_request)
        fields = msgspec.to_builtins(self._front_end.completed_adapter(lora_request))
        return all(await self._call_each("add_lora", fields))

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter by its `lora_int_id` once no request uses it; false if there is none."""
        return any(await self._call_each("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of the adapters in host memory."""
        return {number for numbers in await self._call_each("list_loras") for number in numbers}

    async def check_integrity(self) -> list[SchedulerStats]:
        """Check the bookkeeping of every core; returns each core's scheduler stats.

        Raises:
            EngineError: an invariant is broken, an internal bug; the core's log has the state.
        """
        stats: list[SchedulerStats] = []
        for core in range(len(self._clients)):
            await self._call(core, "check_integrity")
            stats.append(msgspec.convert(await self._call(core, "stats"), SchedulerStats))
        return stats

    @property
    def is_sleeping(self) -> bool:
        """True if anything of the engine sleeps, or is about to, so that it takes no requests."""
        return self._sleep_control.is_sleeping

    @property
    def asleep(self) -> list[str]:
        """Tags of the parts that sleep."""
        return sorted(self._front_end.rest.asleep)

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop computing until `resume_generation`.

        Requests in flight are aborted (`mode` "abort"), waited for ("wait") or kept ("keep"), and new ones refused, but
        queued with "keep". Unless `clear_cache` is false, cached prefixes are dropped and kept requests computed again.

        Raises:
            ValidationError: there is no such mode.
            UnavailableError: a core is loading.
        """
        self._receivers.ensure()
        await self._sleep_control.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`; no effect while nothing is paused.

        Raises:
            ConflictError: the weights or the KV cache sleep.
        """
        self._receivers.ensure()
        await self._sleep_control.resume()

    async def is_paused(self) -> bool:
        """Return whether no steps are planned."""
        return self.is_sleeping

    @functools.cached_property
    def weights(self) -> Any:
        """Updates of the weights while serving (`quire.training.updates.AsyncWeightUpdates`)."""
        return import_place(WEIGHT_UPDATES["server"])(self)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  - vLLM's name
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the extension class (`worker_extension_cls`) on every worker; return their results.

        Arguments and results are plain data; other results are returned as text.

        Raises:
            ValidationError: there is no such method, or it failed.
            TimeoutError: `timeout` seconds are over; the workers go on.
        """
        call = self._call_each("call_workers", "collective_rpc", [method, list(args), dict(kwargs or {})])
        async with asyncio.timeout(timeout):
            return [result for ranks in await call for result in ranks]

    @property
    def weight_version(self) -> str:
        """Version of the weights in use."""
        return self._front_end.rest.weight_version

    def note_weight_update(self, outcome: str, seconds: float) -> None:
        """Count a weight update (see `StatLogger.weights_updated`)."""
        self._front_end.stat_loggers.weights_updated(outcome, seconds)

    async def rename_weights(self, version: str) -> None:
        """Set the version of the weights in use."""
        await self._sleep_control.rename_weights(version)

    async def replace_weights(self, model_dir: str, version: str, *, keeps_cache: bool = False) -> None:
        """Use the weights of another directory, in all cores or in none; the engine is paused.

        Args:
            keeps_cache: whether running requests keep what the old weights have computed; else they compute it again.

        Raises:
            ValidationError: they do not fit the model, or the engine is not paused; the old ones stay.
        """
        self._receivers.ensure()

        def adopt() -> None:
            self._cores.use_weights(model_dir)

        await self._sleep_control.replace_weights(model_dir, version, adopt, keeps_cache=keeps_cache)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Suspend until `wake_up` and free memory: level 0 none, level 1 the KV cache, level 2 also the weights.

        Requests in flight are aborted (`mode` "abort"), waited for ("wait") or resume at `wake_up` ("keep").
        Calling it while asleep goes deeper, or does nothing.

        Raises:
            ValidationError: there is no such level or mode.
            UnavailableError: a core is loading.
            ConflictError: the engine was woken while it waited for requests.
        """
        self._receivers.ensure()
        await self._sleep_control.sleep(level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake everything, or only the tags among "weights", "kv_cache" and "scheduling"; no effect while awake.

        Steps are planned again once nothing else sleeps.

        Raises:
            ValidationError: there is no such tag.
            ConflictError: a tag needs another one that would still sleep.
            EngineError: the weights cannot be loaded, or memory is short; the affected parts stay asleep.
        """
        self._receivers.ensure()
        await self._sleep_control.wake_up(tags)

    def sleep_with(self, others: OtherFrontEnds) -> None:
        """Set the other front ends of the cores; this front end controls sleep for all of them."""
        self._sleep_control.others = others

    def rest(self, rest: EngineSleepState, *, is_falling_asleep: bool) -> None:
        """Apply the sleep state decided by the controlling front end."""
        self._front_end.rest, self._front_end.is_falling_asleep = rest, is_falling_asleep

    async def explain(self, request_id: str) -> list[Explanation]:
        """Return the explanations of this label's requests, one per sequence.

        Raises:
            NotFoundError: all are unknown, or they ended too long ago.
        """
        sequences = self._front_end.locate_sequences(request_id)
        found = await asyncio.gather(*(self._call(core, "explain", name) for core, name in sequences))
        return decode_explanations(found, request_id)

    def crowding(self) -> str | None:
        """Return why clients should prefer other servers although there is room left; None: no reason."""
        return self._admission.crowding()

    async def call_core(self, method: str, *args: Any) -> Any:
        """Call a utility of the first core and wait for its result.

        Raises:
            EngineError: the core refused; EngineDeadError: it died.
        """
        return await self._call(0, method, *args)

    async def call_cores(self, method: str, *args: Any) -> list[Any]:
        """Call a utility of every core and wait for the results. Raises as `call_core` does."""
        return await self._call_each(method, *args)

    def watch_cores(self, watcher: CoreWatcher) -> None:
        """Report the engine's own core processes, and their replacements, to a watcher."""
        self._cores.watch(watcher)

    def forget(self, front_end: int) -> None:
        """Detach another front end that is gone; its requests are aborted."""
        self._send([(core, Detach(front_end)) for core in range(len(self._clients))])

    def share(self, page: CounterSlot) -> None:
        """Share queue counts and core loads with other front ends; call before there are requests."""
        self.output_processor.waiting = SharedWaiting(page)
        self._front_end.router.share(page)

    def end(self, reason: str) -> None:
        """Fail the engine because its cores are gone for good."""
        self._die(EngineDeadError(reason))

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Notify `stat_logger` of engine events from now on, and of the cores that are ready."""
        self._front_end.stat_loggers.add(stat_logger)

    def num_unfinished_requests(self) -> int:
        """Return the number of sequences in flight."""
        return self._front_end.num_unfinished

    def _close_features(self) -> None:
        if "weights" in vars(self):
            self.weights.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ValidationError: the engine was started without one.
        """
        if self.tokenizer is None:
            raise ValidationError("this engine works on token ids only (skip_tokenizer_init)")
        return self.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.config.model

    async def _call(self, core: int, method: str, *args: Any) -> Any:
        self._receivers.ensure()
        answer, messages = self._front_end.call(core, method, *args)
        self._send(messages)
        return await asyncio.wrap_future(answer)

    async def _call_each(self, method: str, *args: Any) -> list[Any]:
        calls = [self._call(core, method, *args) for core in range(len(self._clients))]
        return await asyncio.gather(*calls)

    if not TYPE_CHECKING:
        __getattr__ = missing_member("AsyncLLM")
