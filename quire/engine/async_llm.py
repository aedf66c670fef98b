"""`AsyncLLM`: many concurrent async generators over one engine.

Invariant: torch-free (unless the cores are asked to run in this process). One pump thread per core (see `pumps`)
hands its messages to the event loop; all other state belongs to the loop's thread. A core that dies after it was
ready, in a process of its own, is replaced, and requests go on in the new one: see `quire.engine.cores`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from quire.beam_search_params import BeamSearchParams
from quire.config import EngineArgs, EngineConfig
from quire.engine.admission import Admission
from quire.engine.bedtime import Bedtime, OtherFrontEnds
from quire.engine.client import closed_on_error
from quire.engine.constraint_checks import ConstraintChecks
from quire.engine.cores import Cores, CoreWatcher, OwnCores
from quire.engine.front_end import FrontEnd, Outgoing, explained
from quire.engine.gathering import Gathering
from quire.engine.ledger import Page
from quire.engine.lexicons import Lexicon
from quire.engine.messages import CoreMessage, Detach
from quire.engine.output_stream import Offer, OutputStream
from quire.engine.pooling_inputs import AS_THEY_ARE, TextOptions
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.pumps import Pumps
from quire.engine.queue_limits import Place, SharedWaiting
from quire.engine.sleep import Rest
from quire.engine.startup import prepare
from quire.engine.tokenizer import beside_loop
from quire.errors import EngineDeadError, EngineError, QuireError, UnavailableError
from quire.inputs import PromptType
from quire.lora_request import LoRARequest
from quire.metrics.stats import StatLogger
from quire.outputs import RequestOutput
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class AsyncLLM:
    """The asynchronous engine. Construction starts the cores and returns at once; `wait_ready` waits for them.

    With `cores`, it is one of several front ends of these, and starts none of its own.

    Raises:
        StartupError: from the constructor for what is seen at once (no such model, bad option, no tokenizer), from
            `wait_ready` for what a core finds.
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
        self._settled = asyncio.Event()
        self._pumps = Pumps(self._clients, self._take_in, self._lose)
        self._restarts: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        self._checks = ConstraintChecks(self.input_processor.constraints)
        self._bedtime = Bedtime(self._front_end, self._send)

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
        """With every automatic value settled; the context that is fitted to memory, once the engine is ready."""
        return self._front_end.config

    @property
    def is_ready(self) -> bool:
        """True once every core has loaded, while one is there and does not seem to hang: a request would begin now."""
        return self._settled.is_set() and not self.errored and bool(self._front_end.cores_up)

    @property
    def stalls(self) -> bool:
        """Whether a core has loaded, and each that has seems to hang: nothing is heard of it, and it does nothing."""
        return self._front_end.stalls

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> QuireError | None:
        """What ended the engine."""
        return self._front_end.dead_error

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            QuireError: a core could not start (a StartupError with the reason) or died.
        """
        self._pumps.ensure()
        await self._settled.wait()
        await self.check_health()

    async def check_health(self) -> None:
        """Raise the error that ended the engine, if it ended."""
        self._front_end.check_health()

    async def check_constraint(self, params: SamplingParams) -> None:
        """Find out whether the constraint of the parameters can be enforced; `generate` then knows it.

        Raises:
            ValidationError: it cannot.
            UnavailableError: others keep the checkers busy.
        """
        await self._checks.settled(params)

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
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until one is `finished`. Closing the generator aborts the request.

        `request_id` is a label: outputs carry it, `abort` takes it, and it need not be unique. `priority` (lower
        first) needs the priority policy; `tenant` is whose share the request takes under the fair one. With
        `lora_request` that adapter is added to the model; one that cannot be used ends the request with finish_reason
        "error" and says why in `stop_reason`. `timeout_s` seconds after the request came, tokenizing included, it ends
        with finish_reason "timeout" and what it has by then. With `otlp_traces_endpoint` its span goes on from
        `trace_headers`: W3C `traceparent` and `tracestate`. `data_parallel_rank` names the replica that computes it, as
        long as that is up. `offer` is called with each output but the last that comes
        while the caller waits for one; what it takes is not yielded. `place` is what was reserved for it and perhaps
        for others.

        Raises:
            ValidationError: before the first output, for a prompt or parameter that cannot be honoured.
            UnavailableError: the queue is full, or the engine sleeps.
            EngineDeadError: the engine died; UnavailableError, EngineError: a core did, and this request does not go on
                in another.
        """
        arrived = self._front_end.clock()
        self._pumps.ensure()
        await self.check_health()
        # A beam search has one output, at the end.
        kind = None if isinstance(sampling_params, BeamSearchParams) else sampling_params.output_kind
        stream = OutputStream(delta=kind is RequestOutputKind.DELTA, offer=offer)
        with self._admission.reserve(sampling_params.n) if place is None else nullcontext(place) as place:
            tokenized = await self._tokenize(prompt, lora_request)
            num_tokens = sampling_params.n * len(tokenized.token_ids)
            self._admission.check_tokens(place, num_tokens)
            if isinstance(sampling_params, SamplingParams):
                sampling_params = await self._checks.settled(sampling_params, tenant)
            name, messages = self._front_end.submit(
                request_id,
                tokenized,
                sampling_params,
                stream.put,
                priority=priority,
                tenant=tenant,
                lora_request=lora_request,
                timeout_s=timeout_s,
                trace_headers=trace_headers,
                data_parallel_rank=data_parallel_rank,
                arrived=arrived,
            )
            place.join(sampling_params.n, num_tokens)
        try:
            self._send(messages)
            self._expire()  # its time may be over already
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
        """Yield what is pooled of a prompt; closing the generator before aborts the request.

        `terms` are those of `encode_all`, which raises what this does.
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
        options: TextOptions = AS_THEY_ARE,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What is pooled of each prompt, in order; each is a request of its own, with a label of its own.

        `options` say how texts become tokens, and `tokenization_kwargs` the same under vLLM's names, over them.

        Two batches of them are in the engine at a time, so that many prompts of one caller leave room for others
        between them. Cancelling aborts what is left.

        Raises:
            ValidationError: a prompt or parameter cannot be honoured.
            UnavailableError: the queue is full, or the engine sleeps.
            DeadlineError: `timeout_s` is over; EngineError: a prompt failed, or was aborted, or the engine died.
        """
        terms: dict[str, Any] = {"priority": priority, "tenant": tenant, "timeout_s": timeout_s}
        terms |= {"trace_headers": trace_headers, "arrived": self._front_end.clock()}
        terms |= {"lora_request": lora_request, "data_parallel_rank": data_parallel_rank}
        self._pumps.ensure()
        await self.check_health()
        window = 2 * self.config.scheduler.max_num_seqs
        options = options.with_kwargs(tokenization_kwargs)
        gathering, names = Gathering(len(prompts)), list[str]()
        with self._admission.reserve(min(len(prompts), window)) as reserved:
            tokenized = [await self._tokenize(prompt, lora_request, options) for prompt in prompts]
            self._admission.check_tokens(reserved, sum(len(one.token_ids) for one in tokenized[:window]))
        try:
            while gathering.num_missing:
                num_open = gathering.num_missing - (len(prompts) - len(names))
                for place in range(len(names), min(len(names) + window - num_open, len(prompts))):
                    name, messages = self._front_end.submit(
                        request_ids[place], tokenized[place], pooling_params, gathering.sink(place), **terms
                    )
                    names.append(name)
                    self._send(messages)
                self._expire()  # their time may be over already
                await gathering.news()
            return gathering.all()
        finally:
            for name in names:
                self._send(self._front_end.release(name))

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by label with finish_reason "abort"; unknown labels are ignored."""
        self._send(self._front_end.abort(request_ids))

    def labels(self) -> list[str]:
        """Of the requests in flight, oldest first."""
        return self._front_end.labels()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, on a core that is running requests."""
        return all(await self._call_each("reset_prefix_cache"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before a request wants it, beside the steps; true when every core has it.

        Of a core that takes another's place, the first request reads it again.

        Raises:
            ValidationError: it cannot be used; the message names the file, the tensor and the limit.
        """
        await self.lexicon_of(lora_request)
        fields = msgspec.to_builtins(lora_request)
        return all(await self._call_each("add_lora", fields))

    async def lexicon_of(self, adapter: LoRARequest | None) -> Lexicon:
        """By what the texts of an adapter's requests, or of the model's, are token ids; its files are read in a thread.

        Raises:
            ValidationError: its tokenizer does not fit the model's.
        """
        lexicons = self.input_processor.lexicons
        known = lexicons.known(adapter)
        return await asyncio.to_thread(lexicons.of, adapter) if known is None else known

    async def remove_lora(self, lora_id: int) -> bool:
        """Let go of an adapter, by its `lora_int_id`, when no request has it any more; false if none is there."""
        return any(await self._call_each("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """The `lora_int_id`s of the adapters in the host's memory."""
        return {number for numbers in await self._call_each("list_loras") for number in numbers}

    async def check_integrity(self) -> list[SchedulerStats]:
        """Check the bookkeeping of every core; returns what each has in use.

        Raises:
            EngineError: a core's does not hold, which is a bug of ours; its log has the state.
        """
        stats: list[SchedulerStats] = []
        for core in range(len(self._clients)):
            await self._call(core, "check_integrity")
            stats.append(msgspec.convert(await self._call(core, "stats"), SchedulerStats))
        return stats

    @property
    def is_sleeping(self) -> bool:
        """Whether anything of the engine sleeps, or is about to, so that it takes no requests."""
        return self._bedtime.is_sleeping

    @property
    def asleep(self) -> list[str]:
        """The tags that sleep."""
        return sorted(self._front_end.rest.asleep)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop until `wake_up`, and give memory back: at level 0 none, at 1 the KV cache's, at 2 the weights' too.

        Requests in flight end (`mode` "abort"), are waited for ("wait") or go on when the engine wakes ("keep").
        Calling it while asleep goes deeper, or does nothing.

        Raises:
            ValidationError: there is no such level or mode.
            UnavailableError: a core is loading.
            ConflictError: the engine was woken while it waited for requests.
        """
        self._pumps.ensure()
        await self._bedtime.sleep(level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Have everything again, or of "weights", "kv_cache" and "scheduling" these; without effect while awake.

        Steps are planned again once nothing else sleeps.

        Raises:
            ValidationError: there is no such tag.
            ConflictError: one of them needs what would still sleep.
            EngineError: the weights cannot be loaded, or memory is short; what could not wake sleeps on.
        """
        self._pumps.ensure()
        await self._bedtime.wake_up(tags)

    def sleep_with(self, others: OtherFrontEnds) -> None:
        """The cores have other front ends, too, for which this one decides when they sleep."""
        self._bedtime.others = others

    def rest(self, rest: Rest, *, dozes: bool) -> None:
        """The front end that decides has put the cores to sleep, is about to, or has woken them."""
        self._front_end.rest, self._front_end.dozes = rest, dozes

    async def explain(self, request_id: str) -> list[Explanation]:
        """Why the requests of this label wait or waited, for each of their sequences.

        Raises:
            NotFoundError: no core knows any, or they ended too long ago.
        """
        asked = self._front_end.whereabouts(request_id)
        found = await asyncio.gather(*(self._call(core, "explain", name) for core, name in asked))
        return explained(found, request_id)

    def reserve(self, num_sequences: int = 1) -> AbstractContextManager[Place]:
        """A place for a request that is to be made ready, before that costs anything; whatever of it was not handed to
        `generate` by the end of the context is given up.

        Raises:
            UnavailableError: the queue is full, memory short, or the engine sleeps; says which limit is met.
        """
        self._admission.check_memory()
        return self._admission.reserve(num_sequences)

    def crowding(self) -> str | None:
        """Why new requests should rather go elsewhere, though there is some room yet; None: no reason."""
        return self._admission.crowding()

    def check_memory(self) -> None:
        """Whether there is memory for work that the engine has no part in, such as tokenizing.

        Raises:
            UnavailableError: not now; says how much is left, and how much is to be.
        """
        self._admission.check_memory()

    async def call_core(self, method: str, *args: Any) -> Any:
        """Call a utility of the first core and wait for its result.

        Raises:
            EngineError: the core refused; EngineDeadError: it died.
        """
        return await self._call(0, method, *args)

    def watch_cores(self, watcher: CoreWatcher) -> None:
        """Tell somebody of the engine's cores, which it started in processes of their own, and of those after them."""
        self._cores.watch(watcher)

    def forget(self, front_end: int) -> None:
        """Another front end of the cores is gone; what it has asked for ends."""
        self._send([(core, Detach(front_end)) for core in range(len(self._clients))])

    def share(self, page: Page) -> None:
        """Count what waits, and the cores' loads, with those of other front ends; before there are requests."""
        self.output_processor.waiting = SharedWaiting(page)
        self._front_end.router.share(page)

    def end(self, reason: str) -> None:
        """There is no core any more, and none will come."""
        self._die(EngineDeadError(reason))

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Tell `stat_logger` what the engine does from now on, and which cores are ready."""
        self._front_end.stat_loggers.add(stat_logger)

    def num_unfinished_requests(self) -> int:
        """Sequences in flight."""
        return self._front_end.num_unfinished

    async def shutdown(self) -> None:
        """End the cores; requests in flight end with EngineDeadError. Calling it twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._cores.stop()
        self._die(EngineDeadError("the engine was shut down"))
        self._set_timer()
        await asyncio.gather(*self._restarts)
        for client in self._clients:
            await asyncio.to_thread(client.close)
        await self._pumps.join()
        await asyncio.to_thread(self._front_end.stat_loggers.close)
        self.input_processor.constraints.close()

    async def _tokenize(
        self, prompt: PromptType, adapter: LoRARequest | None, options: TextOptions = AS_THEY_ARE
    ) -> TokenizedPrompt:
        await self.lexicon_of(adapter)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        num_chars = len(text) if isinstance(text, str) else 0
        return await beside_loop(num_chars, self.input_processor.tokenize, prompt, options, adapter=adapter)

    async def _call(self, core: int, method: str, *args: Any) -> Any:
        self._pumps.ensure()
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
        """One timer, for the deadline that comes first."""
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
        except (
            Exception
        ):  # a bug of ours: the loop would log it and go on, and every stream would wait for ever
            logger.exception("the front end failed")
            self._die(EngineDeadError("the engine's front end has failed"))
        if self._front_end.core_ready is not None:
            self._settled.set()

    def _lose(self, core: int, error: QuireError) -> None:
        """A core is dead: go on without it until there is another, or end."""
        flights, elsewhere = self._front_end.in_flight(core), self._front_end.in_flight_elsewhere(core)
        try:
            if self._closed.is_set():
                raise error
            verdict = self._cores.lost(core, flights, elsewhere, error, was_ready=self._settled.is_set())
        except QuireError as end:
            self._die(end)
            return
        self._send(self._front_end.lose(core, verdict.failed, self._why_it_ends))
        restart = asyncio.create_task(self._replace(core, verdict.restart_in_s or 0.0))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    @property
    def _why_it_ends(self) -> QuireError:
        """What a request is told that ends with its core."""
        if self.config.supervision.on_core_death == "error":
            return UnavailableError(
                "the engine core died while it had this request; send it again", retry_after=2
            )
        return EngineError(
            "the engine core died twice while it worked on this request, which is not tried again"
        )

    async def _replace(self, core: int, delay_s: float) -> None:
        """Until the new client is there, what is sent to the core is lost, and all of it is in what is unfinished."""
        try:
            is_there = await self._cores.replace(core, delay_s)
        except (QuireError, OSError) as error:
            self._lose(core, EngineDeadError(f"no new engine core can be started: {error}"))
            return
        if is_there:
            self._send(self._front_end.unfinished(core))
            self._pumps.start(core)

    def _die(self, error: QuireError) -> None:
        self._front_end.die(error)
        self._settled.set()
