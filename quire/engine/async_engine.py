# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engine: many concurrent async generators over one engine.

Invariant: torch-free (unless the cores run in this process). One receiver thread per core (see `CoreReceivers`) hands
its messages to the event loop; all other state belongs to the loop's thread. A core process that dies after it was
ready is replaced, and its requests resume in the new one: see `quire.engine.cores`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.admission import Admission
from quire.engine.client import closed_on_error
from quire.engine.cores import Cores, OwnCores
from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.messages import CoreMessage
from quire.engine.output_stream import CoreReceivers, Offer, OutputStream
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import QueueReservation
from quire.engine.sleep_control import make_sleep_control
from quire.engine.startup import prepare
from quire.engine.tokenizer import INLINE_CHARS, beside_loop
from quire.engine.tokenizer_cache import TokenizerContext
from quire.errors import EngineDeadError, EngineError, QuireError, UnavailableError
from quire.inputs import PromptType
from quire.outputs import RequestOutput
from quire.pooling_params import DEFAULT_TEXT_OPTIONS, TextOptions
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.vllm_names.parameters import with_vllm_keywords

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Base of `AsyncLLM`: owns the front end, the receivers and the timer, and generates."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False, cores: Cores | None = None) -> None:
        if cores is None:
            cores = OwnCores(prepare(config, "server"), in_process=in_process)
        self._cores = cores
        self._clients = cores.clients
        with closed_on_error(self._clients):
            self._front_end = FrontEnd(
                cores.config,
                takes_callables=in_process,
                num_cores=len(self._clients),
                number=cores.front_end,
                stalls=lambda core: self._clients[core].stalls,
            )
        self._admission = Admission(self._front_end)
        self.tokenizer = self._front_end.tokenizer
        self.input_processor = self._front_end.input_processor
        self.output_processor = self._front_end.output_processor
        self._all_ready = asyncio.Event()
        self._receivers = CoreReceivers(self._clients, self._take_in, self._lose)
        self._restarts: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        self._closing: Awaitable[None] | None = None
        self._sleep_control = make_sleep_control(self._front_end, self._send)

    @property
    def config(self) -> EngineConfig:
        """Configuration with all automatic values resolved; `max_model_len` is fitted to memory once the engine is
        ready.
        """
        return self._front_end.config

    @property
    def is_ready(self) -> bool:
        """True once every core has loaded, while one is up and responsive: a request would start now."""
        return self._all_ready.is_set() and not self.errored and bool(self._front_end.cores_up)

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> QuireError | None:
        """Error that ended the engine."""
        return self._front_end.dead_error

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            QuireError: a core could not start (a StartupError with the reason) or died.
        """
        self._receivers.ensure()
        await self._all_ready.wait()
        await self.check_health()

    async def check_health(self) -> None:
        """Raise the error that ended the engine, if it ended."""
        self._front_end.check_health()

    @with_vllm_keywords("AsyncLLM.generate")
    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        offer: Offer | None = None,
        place: QueueReservation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until one is `finished`. Closing the generator aborts the request.

        `request_id` is a label: outputs carry it, `abort` takes it, and it need not be unique. `priority` (lower
        first) needs the priority policy; `tenant` is the account under the fair policy. `lora_request` names an
        adapter; one that cannot be used finishes the request with finish_reason "error" and the reason in
        `stop_reason`. `timeout_s` seconds after the call, tokenizing included, the request finishes with finish_reason
        "timeout" and its output so far. With `otlp_traces_endpoint` its span continues `trace_headers`: W3C
        `traceparent` and `tracestate`. `data_parallel_rank` selects the replica, as long as that is up. `offer` is
        called with each output but the last that arrives while the caller waits for one; outputs that it accepts are
        not yielded. `place` is a reservation for this and perhaps other requests.

        Raises:
            ValidationError: before the first output, for an invalid prompt or parameter.
            UnavailableError: the queue is full, or the engine sleeps.
            EngineDeadError: the engine died; UnavailableError, EngineError: a core died and this request does not
            resume.
        """
        arrived = self._front_end.clock()
        self._receivers.ensure()
        await self.check_health()
        # A beam search has one output, at the end.
        kind = None if isinstance(sampling_params, BeamSearchParams) else sampling_params.output_kind
        stream = OutputStream(delta=kind is RequestOutputKind.DELTA, offer=offer)
        with self._admission.reserve(sampling_params.n) if place is None else nullcontext(place) as place:
            tokenized = await self._tokenize(prompt, lora_request)
            num_tokens = sampling_params.n * len(tokenized.token_ids)
            self._admission.check_tokens(place, num_tokens)
            if isinstance(sampling_params, SamplingParams):
                sampling_params = await self.input_processor.constraints.validated_async(
                    sampling_params, tenant
                )
            name, messages = self._front_end.submit(
                request_id,
                tokenized,
                sampling_params,
                stream.put,
                priority=priority,
                tenant=tenant,
                adapter_request=lora_request,
                timeout_s=timeout_s,
                trace_headers=trace_headers,
                data_parallel_rank=data_parallel_rank,
                arrived=arrived,
            )
            place.join(sampling_params.n, num_tokens)
        try:
            self._send(messages)
            self._expire()  # the deadline may have passed
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._send(self._front_end.release(name))

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by label with finish_reason "abort"; unknown labels are ignored."""
        self._send(self._front_end.abort(request_ids))

    def labels(self) -> list[str]:
        """Return labels of the requests in flight, oldest first."""
        return self._front_end.labels()

    async def get_tokenizer_context(self, adapter: LoRARequest | None) -> TokenizerContext:
        """Return the tokenizer context of an adapter, or of the model for None; its files are read in a thread.

        Raises:
            ValidationError: its tokenizer does not fit the model's.
        """
        tokenizers = self.input_processor.tokenizers
        if not self._front_end.has_completed(adapter):
            await asyncio.to_thread(self._front_end.completed_adapter, adapter)
        known = tokenizers.known(adapter)
        return await asyncio.to_thread(tokenizers.of, adapter) if known is None else known

    @property
    def refuses_requests(self) -> bool:
        """True if new requests are refused because the engine sleeps; a paused one may queue them."""
        return self._sleep_control.refuses

    def reserve(self, num_sequences: int = 1) -> AbstractContextManager[QueueReservation]:
        """Reserve queue room before a request is prepared; whatever is not passed to `generate` within the context is
        released.

        Raises:
            UnavailableError: the queue is full, memory short, or the engine sleeps; names the limit.
        """
        self._admission.check_memory()
        return self._admission.reserve(num_sequences)

    def check_memory(self) -> None:
        """Check that there is memory for work outside the engine, such as tokenizing.

        Raises:
            UnavailableError: with the memory left and the required reserve.
        """
        self._admission.check_memory()

    def shutdown(self) -> Awaitable[None]:
        """Stop the cores; requests in flight fail with EngineDeadError. May be called twice.

        The result may be awaited until everything is released, which happens without that as well. Without a running
        event loop everything is released on return.
        """
        if not self._closed.is_set():
            self._closed.set()
            self._cores.stop()
            self._die(EngineDeadError("the engine was shut down"))
            if self._timer is not None:
                self._timer.cancel()
        if self._closing is None:
            self._closing = _closing_of(self._release())
        return self._closing

    def _close_features(self) -> None:
        """Release what a derived class holds beside the cores."""

    async def _release(self) -> None:
        await asyncio.gather(*self._restarts)
        self._close_features()
        try:
            for client in self._clients:
                await asyncio.to_thread(client.close)
        except asyncio.CancelledError:  # the loop ends
            for client in self._clients:
                client.close()
            raise
        await self._receivers.join()
        await asyncio.to_thread(self._front_end.stat_loggers.close)
        self.input_processor.close()

    async def _tokenize(
        self, prompt: PromptType, adapter: LoRARequest | None, options: TextOptions = DEFAULT_TEXT_OPTIONS
    ) -> TokenizedPrompt:
        await self.get_tokenizer_context(adapter)
        text = prompt.get("prompt", prompt.get("encoder_prompt")) if isinstance(prompt, dict) else prompt
        num_chars = len(text) if isinstance(text, str) else 0
        if isinstance(prompt, dict) and "prompt_embeds" in prompt:  # hashed and written
            num_chars = INLINE_CHARS + 1
        return await beside_loop(num_chars, self.input_processor.tokenize, prompt, options, adapter=adapter)

    def _send(self, messages: list[Outgoing]) -> None:
        for core, message in messages:
            self._clients[core].send(message)

    def _set_timer(self) -> None:
        """Schedule one timer for the earliest deadline."""
        deadline = self._front_end.next_deadline
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            delay = max(0.0, deadline - self._front_end.clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._send(self._front_end.expire(self._front_end.clock()))
        self._set_timer()

    def _take_in(self, core: int, messages: list[CoreMessage]) -> None:
        try:
            for message in messages:
                self._send(self._front_end.take_in(core, message))
        except Exception:  # internal bug: the loop would only log it, and every stream would wait forever
            logger.exception("the front end failed")
            self._die(EngineDeadError("the engine's front end has failed"))
        if self._front_end.core_ready is not None:
            self._all_ready.set()

    def _lose(self, core: int, error: QuireError) -> None:
        """Handle a dead core: continue without it until it is replaced, or fail the engine."""
        in_flight, elsewhere = self._front_end.in_flight(core), self._front_end.in_flight_elsewhere(core)
        try:
            if self._closed.is_set():
                raise error
            verdict = self._cores.lost(core, in_flight, elsewhere, error, was_ready=self._all_ready.is_set())
        except QuireError as end:
            self._die(end)
            return
        self._send(self._front_end.lose(core, verdict.failed, self._core_death_error))
        restart = asyncio.create_task(self._replace(core, verdict.restart_in_s or 0.0))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    @property
    def _core_death_error(self) -> QuireError:
        """Error for requests that end with their core."""
        if self.config.supervision.on_core_death == "error":
            return UnavailableError(
                "the engine core died while it had this request; send it again", retry_after=2
            )
        return EngineError("the engine core died twice while it worked on this request; it is not retried")

    async def _replace(self, core: int, delay_s: float) -> None:
        """Replace a core; messages sent meanwhile are lost and resent with the unfinished requests."""
        try:
            is_there = await self._cores.replace(core, delay_s)
        except (QuireError, OSError) as error:
            self._lose(core, EngineDeadError(f"no new engine core can be started: {error}"))
            return
        if is_there:
            self._send(self._front_end.unfinished(core))
            self._receivers.start(core)

    def _die(self, error: QuireError) -> None:
        self._front_end.die(error)
        self._all_ready.set()


def _closing_of(release: Coroutine[Any, Any, None]) -> Awaitable[None]:
    """Run a coroutine in the background of the running loop, or to its end if there is no loop."""
    try:
        return asyncio.get_running_loop().create_task(release)
    except RuntimeError:
        asyncio.run(release)
        return _Done()


class _Done:
    """Awaitable of what is done."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
