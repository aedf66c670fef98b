# SPDX-License-Identifier: Apache-2.0
"""`OfflineEngine`: base of `LLM`; runs requests to completion on an engine in this process.

Invariant: one thread at a time; an error leaves no request behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from tqdm import tqdm

from quire.adapters import AdapterRequest, adapter_terms
from quire.engine.llm_engine import LLMEngine
from quire.engine.sync_engine import SingleThreadGuard
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.outputs import RequestOutput
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.sampling_params import SamplingParams
from quire.vllm_names.members import missing_member
from quire.vllm_names.parameters import with_vllm_keywords

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from quire.metrics.reader import Metric

T = TypeVar("T")


class OfflineRequest(NamedTuple):
    """Arguments of `LLMEngine.add_request` for one prompt."""

    prompt: PromptType
    params: SamplingParams
    priority: int
    adapter: AdapterRequest | None


class OfflineEngine:
    """Base of `LLM`: the engine, its tokenizer, sleep and shutdown."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self._request_numbers = itertools.count()
        self._one_thread = SingleThreadGuard()
        self._registry: CollectorRegistry | None = None

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ValidationError: the engine was started without one.
        """
        if self.llm_engine.tokenizer is None:
            raise ValidationError("this engine works on token ids only (skip_tokenizer_init)")
        return self.llm_engine.tokenizer

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the extension class or the worker by name, or a function with the worker as first argument.

        Returns the result of each worker. Workers in other processes can be called by the names of the extension class
        (`worker_extension_cls`) alone, with plain data. `timeout` must be None: the call runs in this thread.

        Raises:
            ValidationError: the workers are in other processes, or there is a timeout.
            Exception: as the method or function raises.
        """
        if timeout is not None:
            raise ValidationError("collective_rpc runs in this thread and takes no timeout", param="timeout")

        config = self.llm_engine.config
        is_elsewhere = config.parallel.num_ranks * config.parallel.num_replicas > 1
        if is_elsewhere and isinstance(method, str) and config.training.worker_extension_cls:
            terms = [method, list(args), dict(kwargs or {})]
            each = self.llm_engine.call_cores("call_workers", "collective_rpc", terms)
            return [result for ranks in each for result in ranks]

        def call(worker: Any) -> Any:
            owner = (
                worker.extension if isinstance(method, str) and hasattr(worker.extension, method) else worker
            )
            function = getattr(owner, method) if isinstance(method, str) else partial(method, worker)
            return function(*args, **(kwargs or {}))

        return [self.llm_engine.run_on_worker(call)]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model, a torch module; return a list of one result.

        Raises:
            ValidationError: as `collective_rpc`.
            Exception: as the function raises.
        """
        return [self.llm_engine.run_on_worker(lambda worker: function(worker.model))]

    @property
    def weights(self) -> Any:
        """Updates of the weights (`quire.training.updates.WeightUpdates`)."""
        return self.llm_engine.weights

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics since its start, under vLLM's names.

        Raises:
            ValidationError: the engine was started without `disable_log_stats=False`.
        """
        if self._registry is None:
            raise ValidationError("LLM counts nothing unless it is made with disable_log_stats=False")
        from quire.metrics.reader import read_metrics

        return read_metrics(self._registry)

    def count_metrics(self) -> None:
        """Count from now on, for `get_metrics`."""
        from prometheus_client import CollectorRegistry

        from quire.metrics.prometheus import PrometheusStatLogger

        config = self.llm_engine.config
        self._registry = CollectorRegistry()
        name = next(iter(config.model.served_model_name), config.model.model)
        counters = PrometheusStatLogger(name, config.model.max_model_len, registry=self._registry)
        self.llm_engine.add_stat_logger(counters)

    @with_vllm_keywords("LLM.reset_prefix_cache")
    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False, without effect, while requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Drop the embeddings of media that no request uses; return False if some are in use and stay."""
        return self.llm_engine.reset_encoder_cache()

    @with_vllm_keywords("LLM.start_profile")
    def start_profile(self) -> None:
        """Start a profile of the steps, with the settings of `profiler_config`.

        Raises:
            ValidationError: the engine has no `profiler_config`, or several ranks, or a profile is running.
        """
        self.llm_engine.start_profile()

    def stop_profile(self) -> list[str]:
        """End the profile, and return the paths of its files, one for each replica. Raises as `start_profile`."""
        return self.llm_engine.stop_profile()

    @with_vllm_keywords("LLM.sleep")
    def sleep(self, level: int = 1) -> None:
        """Release memory until `wake_up`: the KV cache (level 1), also the weights (2), or none (0).

        Raises:
            ValidationError: the level does not exist.
            ConflictError: another thread is generating.
        """
        with self._one_thread:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore everything, or these of "weights", "kv_cache" and "scheduling".

        Raises:
            ConflictError: a tag depends on one that would stay asleep.
            EngineError: the weights cannot be loaded, or memory is short; what was not restored stays asleep.
        """
        with self._one_thread:
            self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release the engine."""
        self.llm_engine.shutdown()

    @contextmanager
    def _abort_on_error(self) -> Iterator[list[str]]:
        """Collect the ids of requests, and abort all of them after an error."""
        requests: list[str] = []
        try:
            yield requests
        except BaseException:
            self.llm_engine.abort_request(requests)
            self.llm_engine.step()
            raise

    def _request_id(self) -> str:
        return str(next(self._request_numbers))

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[Any]:
        """Run until all requests have finished; return the last output of each, in this order."""
        finished: dict[str, Any] = {}
        bar = tqdm(
            total=len(request_ids), desc="Processed prompts", unit="prompt", disable=not use_tqdm or None
        )
        speed = SpeedMeter(bar)
        with bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    finished[output.request_id] = output
                    speed.add(output)
        return [finished[request_id] for request_id in request_ids]

    def _run_each(self, requests: Iterable[OfflineRequest]) -> Generator[tuple[int, Any], None, None]:
        """Yield the index and the last output of each request as it finishes, with a bounded number in the engine.

        The engine serves no other call until the iterator is exhausted or closed, which aborts what is left.
        """
        config, waiting = self.llm_engine.config, enumerate(requests)
        window = 2 * config.scheduler.max_num_seqs * config.parallel.num_replicas
        indices: dict[str, int] = {}
        with self._one_thread, self._abort_on_error() as unfinished:
            while True:
                for index, request in itertools.islice(waiting, window - len(indices)):
                    indices[self._add(request)] = index
                    unfinished[:] = indices
                if not indices:
                    return
                for output in self.llm_engine.step():
                    yield indices.pop(output.request_id), output
                unfinished[:] = indices

    def _add(self, request: OfflineRequest) -> str:
        """Queue a request and return its id.

        Raises:
            ValidationError: the prompt or a parameter is invalid; nothing was queued.
        """
        request_id = self._request_id()
        self.llm_engine.add_request(
            request_id,
            request.prompt,
            request.params,
            priority=request.priority,
            **adapter_terms(request.adapter),
        )
        return request_id

    if not TYPE_CHECKING:
        __getattr__ = missing_member("LLM")


class SpeedMeter:
    """Tokens per second as the postfix of a progress bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._num_input = 0
        self._num_output = 0

    def add(self, output: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        self._num_input += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)


def as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, str | dict):
        return [cast(PromptType, prompts)]
    if not isinstance(prompts, Iterable):
        raise ValidationError(f"a prompt is a text or a list of token ids, got {prompts!r}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(PromptType, list(prompts))]
    return list(cast(Sequence[PromptType], prompts))


def per_prompt(name: str, value: Any, prompts: Sequence[Any]) -> list[Any]:
    """Return a value for each prompt; raise ValidationError if there are several, but not one per prompt."""
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValidationError(f"{name} has {len(value)} entries for {len(prompts)} prompts", param=name)
    return list(value)


def each_with(name: str, value: Any, prompts: Iterable[T]) -> Iterator[tuple[T, Any]]:
    """Yield each prompt with its value: the same for all, or the next one of an iterable.

    Raises:
        ValidationError: the values end before the prompts.
    """
    values = iter(value) if isinstance(value, Iterable) else itertools.repeat(value)
    for index, prompt in enumerate(prompts):
        try:
            own = next(values)
        except StopIteration:
            raise ValidationError(
                f"{name} has {index} entries, but there are more prompts", param=name
            ) from None
        yield prompt, own
