"""`LLMEngine`: the synchronous engine, one `step()` at a time.

Invariant: no thread and no event loop of its own; `step` is the only method in which the model runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.config import EngineArgs, EngineConfig
from quire.engine.client import CoreClient, make_client
from quire.engine.explanations import explanations
from quire.engine.input_processor import InputProcessor
from quire.engine.messages import AbortRequests, CoreReady, EngineCoreOutputs, UtilityCall, UtilityResult
from quire.engine.output_processor import OutputProcessor
from quire.engine.startup import load_tokenizer, prepare
from quire.engine.tokenizer import Tokenizer
from quire.errors import EngineError, ValidationError
from quire.inputs import PromptType
from quire.metrics.stats import IterationStats, StatLogger
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats


class LLMEngine:
    """Requests in, outputs out; the core runs in this process unless `in_process=False`.

    Raises:
        StartupError: the engine cannot start; the message says why.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool = True) -> None:
        self.config = prepare(config, "offline")
        self.tokenizer: Tokenizer | None = load_tokenizer(self.config)
        self.input_processor = InputProcessor(self.config, self.tokenizer, strict_length=False)
        self.output_processor = OutputProcessor(self.tokenizer)
        self._core_ids: dict[str, list[str]] = {}
        self._outputs: list[RequestOutput | Exception] = []
        self._stat_loggers: list[StatLogger] = []
        self._results: dict[int, UtilityResult] = {}
        self._num_calls = 0
        self._client: CoreClient = make_client(self.config, in_process=in_process)
        self.core_ready = self._wait_ready()
        self.config = self.config.evolve(max_model_len=self.core_ready.max_model_len)
        self.input_processor.settle(self.config)

    @staticmethod
    def from_engine_args(engine_args: EngineArgs) -> LLMEngine:
        """Build from flat arguments."""
        return LLMEngine(engine_args.create_engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> str:
        """Queue a request; its id must not belong to an unfinished one.

        `priority` (lower first) needs the priority policy; `tenant` is whose share it takes under the fair one.

        Raises:
            ValidationError: the prompt, a parameter or the id cannot be honoured; nothing was queued.
        """
        if request_id in self._core_ids:
            raise ValidationError(f"request id {request_id!r} is already in use", param="request_id")
        tokenized = self.input_processor.tokenize(prompt)
        requests = self.input_processor.process(
            request_id, tokenized, params, priority=priority, tenant=tenant
        )
        self._core_ids[request_id] = [request.request_id for request in requests]
        self.output_processor.add_request(request_id, tokenized, params, requests, self._outputs.append)
        for request in requests:
            self._client.send(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and return what is new.

        Raises:
            EngineDeadError: the core died; only with a core in another process.
        """
        if self.has_unfinished_requests():
            for message in self._client.receive():
                self._take_in(message)
        return self._collect()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests with finish_reason "abort"; their last output comes with the next `step`.

        Unknown ids are ignored.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        core_ids = [core_id for rid in ids for core_id in self._core_ids.get(rid, [])]
        aborted, stats = self.output_processor.abort(core_ids)
        if aborted:
            self._client.send(AbortRequests(aborted))
            self._record(stats, None)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._core_ids)

    def add_stat_logger(self, logger: StatLogger) -> None:
        """Send every later step's statistics to `logger`."""
        self._stat_loggers.append(logger)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if some are in use."""
        return bool(self.call_core("reset_prefix_cache"))

    def explain(self, request_id: str) -> list[Explanation]:
        """Why a request waits or waited, for each of its sequences; `print` one to read it.

        Raises:
            NotFoundError: the core does not know it, or it ended too long ago.
        """
        core_ids = self._core_ids.get(request_id, [request_id])
        return explanations([self.call_core("explain", core_id) for core_id in core_ids], request_id)

    def call_core(self, method: str, *args: Any) -> Any:
        """Call a utility of the core and wait for its result."""
        self._num_calls += 1
        self._client.send(UtilityCall(self._num_calls, method, list(args)))
        while self._num_calls not in self._results:
            for message in self._client.receive():
                self._take_in(message)
        result = self._results.pop(self._num_calls)
        if result.error is not None:
            raise EngineError(result.error)
        return result.result

    def shutdown(self) -> None:
        """End the core; calling it twice is fine."""
        self._client.close()

    def _wait_ready(self) -> CoreReady:
        try:
            (ready,) = self._client.receive()
        except BaseException:
            self._client.close()
            raise
        assert isinstance(ready, CoreReady)
        return ready

    def _take_in(self, message: object) -> None:
        if isinstance(message, UtilityResult):
            self._results[message.call_id] = message
        elif isinstance(message, EngineCoreOutputs):
            to_abort, stats = self.output_processor.process(message)
            if to_abort:
                self._client.send(AbortRequests(to_abort))
            self._record(stats, message.stats)

    def _record(self, stats: IterationStats, scheduler: SchedulerStats | None) -> None:
        for logger in self._stat_loggers:
            logger.record(stats, scheduler)

    def _collect(self) -> list[RequestOutput]:
        collected, self._outputs[:] = list(self._outputs), []
        outputs = []
        for output in collected:
            if isinstance(output, Exception):
                raise output
            if output.finished:
                self._core_ids.pop(output.request_id, None)
            outputs.append(output)
        return outputs
