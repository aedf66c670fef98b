"""`AsyncLLM`: many concurrent async generators over one engine core.

Invariant: torch-free (unless the core is asked to run in this process). One pump thread waits for the core's
messages and hands them to the event loop; all other state belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from quire.config import EngineArgs, EngineConfig
from quire.engine.client import make_client
from quire.engine.explanations import explanations
from quire.engine.input_processor import InputProcessor, TokenizedPrompt
from quire.engine.messages import (
    AbortRequests,
    CoreMessage,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
)
from quire.engine.output_processor import OutputProcessor
from quire.engine.output_stream import OutputStream
from quire.engine.queue_limits import check_queue
from quire.engine.startup import load_tokenizer, prepare
from quire.engine.tokenizer import Tokenizer
from quire.errors import EngineDeadError, EngineError, QuireError
from quire.inputs import PromptType
from quire.metrics.stats import IterationStats, StatLogger
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)

INLINE_TOKENIZE_CHARS = 4096
"""Shorter prompts are tokenized on the loop (well under a millisecond), longer ones in a thread."""


class AsyncLLM:
    """The asynchronous engine. Construction starts the core and returns at once; `wait_ready` waits for it.

    Raises:
        StartupError: from the constructor for what is seen at once (no such model, bad option), from
            `wait_ready` for what the core finds.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        self.config = prepare(config, "server")
        self._client = make_client(self.config, in_process=in_process)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.config)
        self.input_processor = InputProcessor(self.config, self.tokenizer, strict_length=True)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.core_ready: CoreReady | None = None
        self.dead_error: QuireError | None = None
        self._stat_loggers: list[StatLogger] = []
        self._core_ids_by_label: dict[str, set[str]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()
        self._pump_thread: threading.Thread | None = None
        self._closed = False

    @staticmethod
    def start(config: EngineConfig, *, in_process: bool = False) -> AsyncLLM:
        """Start the core and return without waiting for it."""
        return AsyncLLM(config, in_process=in_process)

    @staticmethod
    def from_engine_args(engine_args: EngineArgs) -> AsyncLLM:
        """Start from flat arguments."""
        return AsyncLLM(engine_args.create_engine_config())

    @property
    def is_ready(self) -> bool:
        """True between the end of loading and the end of the core."""
        return self.core_ready is not None and self.dead_error is None

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            QuireError: the core could not start (a StartupError with the reason) or died.
        """
        self._ensure_pump()
        await self._settled.wait()
        await self.check_health()

    async def check_health(self) -> None:
        """Raise the error that ended the core, if it ended."""
        if self.dead_error is not None:
            raise self.dead_error

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until one is `finished`. Closing the generator aborts the request.

        `request_id` is a label: outputs carry it, `abort` takes it, and it need not be unique. `priority` (lower
        first) needs the priority policy; `tenant` is whose share the request takes under the fair one.

        Raises:
            ValidationError: before the first output, for a prompt or parameter that cannot be honoured.
            UnavailableError: the queue is full.
            EngineDeadError: the core died.
        """
        self._ensure_pump()
        await self.check_health()
        self.check_admission(sampling_params.n)
        tokenized = await self._tokenize(prompt)
        core_id = f"{request_id}-{next(self._numbers):x}"
        requests = self.input_processor.process(
            core_id, tokenized, sampling_params, priority=priority, tenant=tenant
        )
        self.check_admission(len(requests), len(requests) * len(tokenized.token_ids))
        stream = OutputStream(delta=sampling_params.output_kind is RequestOutputKind.DELTA)
        core_ids = self._submit(request_id, tokenized, sampling_params, requests, stream)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._release(request_id, core_ids)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by label with finish_reason "abort"; unknown labels are ignored."""
        labels = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        core_ids = [core_id for label in labels for core_id in self._core_ids_by_label.get(label, ())]
        self._abort(core_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if some are in use."""
        return bool(await self.call_core("reset_prefix_cache"))

    async def explain(self, request_id: str) -> list[Explanation]:
        """Why the requests of this label wait or waited, for each of their sequences.

        Raises:
            NotFoundError: none is in flight.
        """
        core_ids = sorted(self._core_ids_by_label.get(request_id, ()))
        found = [await self.call_core("explain", core_id) for core_id in core_ids]
        return explanations(found, request_id)

    def check_admission(self, num_sequences: int = 1, num_prompt_tokens: int = 0) -> None:
        """Whether so much may join the queue, of which nothing is kept; cheap enough to ask before tokenizing.

        Raises:
            UnavailableError: not now; says what waits and which limit it meets.
        """
        waiting = self.output_processor.waiting
        check_queue(self.config.scheduler, waiting, num_sequences, num_prompt_tokens)

    async def call_core(self, method: str, *args: Any) -> Any:
        """Call a utility of the core and wait for its result.

        Raises:
            EngineError: the core refused; EngineDeadError: it died.
        """
        self._ensure_pump()
        await self.check_health()
        call_id, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._client.send(UtilityCall(call_id, method, list(args)))
        return await future

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Send every later step's statistics to `stat_logger`."""
        self._stat_loggers.append(stat_logger)

    def num_unfinished_requests(self) -> int:
        """Sequences in flight."""
        return self.output_processor.num_unfinished

    async def shutdown(self) -> None:
        """End the core; requests in flight end with EngineDeadError. Calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._die(EngineDeadError("the engine was shut down"))
        await asyncio.to_thread(self._client.close)
        if self._pump_thread is not None:
            await asyncio.to_thread(self._pump_thread.join)

    async def _tokenize(self, prompt: PromptType) -> TokenizedPrompt:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > INLINE_TOKENIZE_CHARS:
            return await asyncio.to_thread(self.input_processor.tokenize, prompt)
        return self.input_processor.tokenize(prompt)

    def _submit(
        self,
        label: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        requests: list[EngineCoreRequest],
        stream: OutputStream,
    ) -> list[str]:
        core_ids = [request.request_id for request in requests]
        self._core_ids_by_label.setdefault(label, set()).update(core_ids)
        self.output_processor.add_request(label, prompt, params, requests, stream.put)
        for request in requests:
            self._client.send(request)
        return core_ids

    def _release(self, label: str, core_ids: list[str]) -> None:
        self._abort(core_ids)
        remaining = self._core_ids_by_label[label]
        remaining.difference_update(core_ids)
        if not remaining:
            del self._core_ids_by_label[label]

    def _abort(self, core_ids: Iterable[str]) -> None:
        aborted, stats = self.output_processor.abort(core_ids)
        if aborted:
            self._abort_in_core(aborted)
            self._record(stats, None)

    def _abort_in_core(self, core_ids: list[str]) -> None:
        if core_ids and self.dead_error is None:
            self._client.send(AbortRequests(core_ids))

    def _ensure_pump(self) -> None:
        if self._pump_thread is None:
            self._loop = asyncio.get_running_loop()
            self._pump_thread = threading.Thread(target=self._pump, name="quire-pump", daemon=True)
            self._pump_thread.start()

    def _pump(self) -> None:
        """Runs in its own thread: blocks on the core, hands messages to the loop."""
        assert self._loop is not None
        try:
            while messages := self._client.receive():
                self._loop.call_soon_threadsafe(self._take_in_all, messages)
        except QuireError as error:
            self._loop.call_soon_threadsafe(self._die, error)
        except Exception:  # an in-process core's own bug: the thread must not end silently
            logger.exception("the engine core failed")
            self._loop.call_soon_threadsafe(self._die, EngineDeadError("the engine core has failed"))

    def _take_in_all(self, messages: list[CoreMessage]) -> None:
        for message in messages:
            self._take_in(message)

    def _take_in(self, message: CoreMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            to_abort, stats = self.output_processor.process(message)
            self._abort_in_core(to_abort)
            self._record(stats, message.stats)
        elif isinstance(message, UtilityResult):
            self._answer(message)
        elif isinstance(message, CoreReady):
            self.core_ready = message
            self.config = self.config.evolve(max_model_len=message.max_model_len)
            self.input_processor.settle(self.config)
            self._settled.set()

    def _record(self, stats: IterationStats, scheduler: SchedulerStats | None) -> None:
        for stat_logger in self._stat_loggers:
            stat_logger.record(stats, scheduler)

    def _answer(self, message: UtilityResult) -> None:
        future = self._calls.pop(message.call_id)
        if future.cancelled():
            return
        if message.error is not None:
            future.set_exception(EngineError(message.error))
        else:
            future.set_result(message.result)

    def _die(self, error: QuireError) -> None:
        if self.dead_error is not None:
            return
        self.dead_error = error
        self.output_processor.fail_all(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._settled.set()
