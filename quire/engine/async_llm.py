# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engine: many concurrent async generators over one engine.

Invariant: torch-free (unless the cores run in this process). One receiver thread per core (see `CoreReceivers`) hands
its messages to the event loop; all other state belongs to the loop's thread. A core process that dies after it was
ready is replaced, and its requests resume in the new one: see `quire.engine.cores`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.adapters import LoRARequest
from quire.config import EngineArgs, EngineConfig, ModelConfig
from quire.engine.admission import Admission
from quire.engine.client import closed_on_error
from quire.engine.cores import Cores, CoreWatcher, OwnCores
from quire.engine.front_end import FrontEnd, Outgoing, decode_explanations
from quire.engine.messages import CoreMessage, Detach
from quire.engine.output_stream import CoreReceivers, Offer, OutputStream
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import QueueReservation, SharedWaiting
from quire.engine.shared_counters import CounterSlot
from quire.engine.sleep_control import OtherFrontEnds, make_sleep_control
from quire.engine.sleep_state import EngineSleepState
from quire.engine.startup import prepare
from quire.engine.tokenizer import INLINE_CHARS, Tokenizer, beside_loop
from quire.engine.tokenizer_cache import TokenizerContext
from quire.errors import EngineDeadError, EngineError, QuireError, UnavailableError, ValidationError
from quire.features import POOLED_OUTPUTS, WEIGHT_UPDATES
from quire.inputs import PromptType
from quire.metrics.stats import StatLogger
from quire.outputs import RequestOutput
from quire.plugins import import_place
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import DEFAULT_TEXT_OPTIONS, PoolingParams, TextOptions
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats
from quire.vllm_names.members import missing_member

logger = logging.getLogger(__name__)


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


class AsyncLLM:
    """Asynchronous engine. Construction starts the cores and returns at once; `wait_ready` waits for them.

    With `cores`, it is one of several front ends of these, and starts none of its own.

    Raises:
        StartupError: from the constructor for errors detected immediately (no such model, bad option, no tokenizer),
            from `wait_ready` for errors of a core.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        in_process: bool = False,
        cores: Cores | None = None,
    ) -> None:
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
        self._access = FrontEndAccess(
            self._front_end, self._admission, self._tokenize, self._send, self._expire
        )

    @staticmethod
    def start(config: EngineConfig) -> AsyncLLM:
        """Start the core and return without waiting for it."""
        return AsyncLLM(config)

    @staticmethod
    def from_engine_args(engine_args: EngineArgs) -> AsyncLLM:
        """Start from flat arguments."""
        return AsyncLLM(engine_args.create_engine_config())

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
    def loading(self) -> Any:
        """Stage of the first core that loads (`quire.engine.core_progress.LoadingState`); None: unknown, or none
        loads.
        """
        return next((state for client in self._clients if (state := client.loading) is not None), None)

    @property
    def stalls(self) -> bool:
        """True if a core has loaded and every loaded core seems to hang."""
        return self._front_end.stalls

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

    async def check_constraint(self, params: SamplingParams) -> None:
        """Check that the constraint of the parameters can be enforced; the result is cached for `generate`.

        Raises:
            ValidationError: it cannot.
            UnavailableError: all checkers are busy.
        """
        await self.input_processor.constraints.validated_async(params)

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
        return await pool(self._access, prompts, pooling_params, request_ids, options, terms)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by label with finish_reason "abort"; unknown labels are ignored."""
        self._send(self._front_end.abort(request_ids))

    def labels(self) -> list[str]:
        """Return labels of the requests in flight, oldest first."""
        return self._front_end.labels()

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

    @property
    def refuses_requests(self) -> bool:
        """True if new requests are refused because the engine sleeps; a paused one may queue them."""
        return self._sleep_control.refuses

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

    def reserve(self, num_sequences: int = 1) -> AbstractContextManager[QueueReservation]:
        """Reserve queue room before a request is prepared; whatever is not passed to `generate` within the context is
        released.

        Raises:
            UnavailableError: the queue is full, memory short, or the engine sleeps; names the limit.
        """
        self._admission.check_memory()
        return self._admission.reserve(num_sequences)

    def crowding(self) -> str | None:
        """Return why clients should prefer other servers although there is room left; None: no reason."""
        return self._admission.crowding()

    def check_memory(self) -> None:
        """Check that there is memory for work outside the engine, such as tokenizing.

        Raises:
            UnavailableError: with the memory left and the required reserve.
        """
        self._admission.check_memory()

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

    async def _release(self) -> None:
        await asyncio.gather(*self._restarts)
        if "weights" in vars(self):
            self.weights.close()
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

    async def _tokenize(
        self, prompt: PromptType, adapter: LoRARequest | None, options: TextOptions = DEFAULT_TEXT_OPTIONS
    ) -> TokenizedPrompt:
        await self.get_tokenizer_context(adapter)
        text = prompt.get("prompt", prompt.get("encoder_prompt")) if isinstance(prompt, dict) else prompt
        num_chars = len(text) if isinstance(text, str) else 0
        if isinstance(prompt, dict) and "prompt_embeds" in prompt:  # hashed and written
            num_chars = INLINE_CHARS + 1
        return await beside_loop(num_chars, self.input_processor.tokenize, prompt, options, adapter=adapter)

    async def _call(self, core: int, method: str, *args: Any) -> Any:
        self._receivers.ensure()
        answer, messages = self._front_end.call(core, method, *args)
        self._send(messages)
        return await asyncio.wrap_future(answer)

    async def _call_each(self, method: str, *args: Any) -> list[Any]:
        calls = [self._call(core, method, *args) for core in range(len(self._clients))]
        return await asyncio.gather(*calls)

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

    if not TYPE_CHECKING:
        __getattr__ = missing_member("AsyncLLM")


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
