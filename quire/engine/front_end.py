"""`FrontEnd`: all of an engine's front but its transport; messages of the cores in, messages for them out.

Invariant: no socket, no thread, no event loop, and time comes from the clock it is given. Every verb that changes
something returns what is to be sent, each message with the index of its core, and the caller sends it in that order.
Each request belongs to one core at a time, forks of a request to the same one, and a request is known until its last
output (or the error that ended the engine) has gone to its sink.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict

import msgspec

from quire.beam_search_params import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.beam_searches import BeamSearches
from quire.engine.file_states import check_files
from quire.engine.flights import Flight, Flights
from quire.engine.input_processor import InputProcessor
from quire.engine.messages import (
    AbortRequests,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityResult,
    add_message,
)
from quire.engine.output_processor import OutputProcessor
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.rank_checks import LAUNCHED
from quire.engine.request_groups import Sink
from quire.engine.router import Router
from quire.engine.routing_policies import RoutedRequest
from quire.engine.sleep import Rest
from quire.engine.startup import load_tokenizer
from quire.engine.utility_calls import UtilityCalls
from quire.errors import ConflictError, NotFoundError, QuireError, UnavailableError, ValidationError
from quire.kv_cache.hashing import ExtraKeys
from quire.lora_request import LoRARequest
from quire.metrics.stats import STAT_LOGGERS
from quire.metrics.told import StatLoggers
from quire.metrics.tracing import make_tracers
from quire.models.gguf.model import forget_files
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.explain import Explanation

Outgoing = tuple[int, CoreRequest]
"""The index of a core, and a message for it."""


class Terms(TypedDict):
    """On whose account, how urgently, and with which adapter."""

    priority: int
    tenant: str
    lora_request: LoRARequest | None


class FrontEnd:
    """Requests, updates and utility calls of one engine with `num_cores` cores.

    Args:
        config: as `prepare` has settled it.
        takes_callables: see `InputProcessor`.
        clock: monotonic seconds, as the cores count them.
        number: which of its cores' front ends this is.
        stalls: whether a core seems to hang, so that others are asked.

    Attributes:
        config: with the context length that the cores have settled, once all of them are ready.
        dead_error: what ended the engine.
        rest: what of the engine sleeps; only the first front end puts cores to sleep, and the others are told.
        dozes: whether it takes no requests because it is about to sleep.

    Raises:
        ModelLoadError: from the constructor; the tokenizer cannot be loaded, or its files have changed since `prepare`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        takes_callables: bool = False,
        num_cores: int = 1,
        clock: Callable[[], float] = time.monotonic,
        number: int = 0,
        stalls: Callable[[int], bool] = lambda core: False,
    ) -> None:
        self.config = config
        self.clock = clock
        self._stalls = stalls
        self.tokenizer = load_tokenizer(config)
        forget_files()
        check_files(config)
        self.input_processor = InputProcessor(
            config,
            self.tokenizer,
            takes_callables=takes_callables,
            clock=clock,
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self._beam_searches = BeamSearches(self.tokenizer)
        plugged_in = [make(config) for make in STAT_LOGGERS.resolve_all()]
        self.stat_loggers = StatLoggers([*make_tracers(config), *plugged_in])
        self.dead_error: QuireError | None = None
        self._rest = Rest()
        self.dozes = False
        self._is_first = number == 0
        self._ready: list[CoreReady | None] = [None] * num_cores
        self._flights = Flights(num_cores, number)
        self.router = Router(config, num_cores)
        self._calls = UtilityCalls(number)

    # Questions

    def __contains__(self, label: str) -> bool:
        """Whether a request of this label is unfinished."""
        return label in self._flights

    def __len__(self) -> int:
        """Labels of unfinished requests."""
        return len(self._flights)

    @property
    def num_unfinished(self) -> int:
        """Sequences whose end has not been published yet."""
        return self.output_processor.num_unfinished + self._beam_searches.num_unfinished

    @property
    def core_ready(self) -> CoreReady | None:
        """What the first core said of itself, once all are ready."""
        return self._ready[0] if None not in self._ready else None

    @property
    def stalls(self) -> bool:
        """Whether a core is ready, and each that is seems to hang."""
        return not self.cores_up and any(ready is not None for ready in self._ready)

    @property
    def cores_up(self) -> list[int]:
        """Those that have loaded, and do not seem to hang."""
        return [
            core for core, ready in enumerate(self._ready) if ready is not None and not self._stalls(core)
        ]

    @property
    def cores_to_ask(self) -> Sequence[int]:
        """Those that are up; all, if none is."""
        return self.cores_up or range(len(self._ready))

    def expects(self, core: int) -> bool:
        """Whether there must be more messages of this core: it is awake and has requests, or owes an answer."""
        return bool((self._flights.num_on(core) and not self.rest) or self._calls.owed_by(core))

    def labels(self) -> list[str]:
        """Of unfinished requests, oldest first."""
        return self._flights.labels()

    def whereabouts(self, label: str) -> list[tuple[int, str]]:
        """Core and core id of each sequence of a label's requests in flight, else of its last one that ended.

        Which core had that one is forgotten, so all are named that are there.
        """
        names = self._flights.known(label)
        if label in self._flights:
            return [(core, name) for core, theirs in self._flights.by_core(names).items() for name in theirs]
        return [(core, name) for core in self.cores_to_ask for name in names]

    def check_health(self) -> None:
        """Raise the error that ended the engine, if it ended."""
        if self.dead_error is not None:
            raise self.dead_error

    @property
    def rest(self) -> Rest:
        """What of the engine sleeps."""
        return self._rest

    @rest.setter
    def rest(self, rest: Rest) -> None:
        self._rest = rest
        self.stat_loggers.rested(rest.state)

    def check_awake(self) -> None:
        """Raises UnavailableError: the engine sleeps."""
        if self.rest or self.dozes:
            raise UnavailableError("the engine sleeps and takes no requests until it is woken", retry_after=2)

    # Requests

    def submit(
        self,
        label: str,
        prompt: TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        sink: Sink,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        arrived: float | None = None,
    ) -> tuple[str, list[Outgoing]]:
        """Check a request and give it to the core that the router names, or to that of the replica with this number.

        It has `timeout_s` seconds from when it `arrived`, by the engine's clock; None: now. `trace_headers` come back
        in the statistics of its end. Returns a name for `release`, which no other request has, and what to send.

        Raises:
            ValidationError: the prompt or a parameter cannot be honoured; nothing was queued.
            UnavailableError: the engine sleeps.
            QuireError: the engine is dead; also if it died while the prompt was tokenized.
        """
        self.check_health()
        self.check_awake()
        _check_timeout(timeout_s, self.config)
        cores = self._cores_for(data_parallel_rank)
        name = self._flights.new_name(label)
        watched = self._watched(name, sink)
        terms = Terms(priority=priority, tenant=tenant, lora_request=lora_request)
        if isinstance(params, BeamSearchParams):
            first, params = self.input_processor.process_beam_search(name, prompt, params, **terms)
            core_ids, messages = self._beam_searches.add(label, prompt, first, params, watched, trace_headers)
        else:
            requests = self._checked(name, prompt, params, terms)
            self.output_processor.add_request(label, prompt, requests, watched, trace_headers)
            core_ids, messages = [one.request_id for one in requests], [add_message(requests)]
        keys = ExtraKeys(prompt.cache_salt, None if lora_request is None else lora_request.key)
        routed = RoutedRequest(prompt.token_ids, len(core_ids), keys)
        core = self.router.route(name, routed, core_ids[0], cores)
        came = self.clock() if arrived is None else arrived
        deadline = None if timeout_s is None else came + timeout_s
        self._flights.take_off(name, Flight(label, core, core_ids), deadline)
        return name, [(core, message) for message in messages]

    def _cores_for(self, replica: int | None) -> Sequence[int]:
        """Those among which the router chooses; a replica that is down is as good as one that nobody asked for."""
        if replica is None:
            return self.cores_to_ask
        served = self.config.parallel.served
        if replica not in served:
            raise ValidationError(
                f"data_parallel_rank is {replica}, and replicas here are {', '.join(map(str, served))}",
                param="data_parallel_rank",
            )
        core = served.index(replica)
        return [core] if core in self.cores_to_ask else self.cores_to_ask

    def _checked(
        self, name: str, prompt: TokenizedPrompt, params: SamplingParams | PoolingParams, terms: Terms
    ) -> list[EngineCoreRequest]:
        if isinstance(params, PoolingParams):
            return [self.input_processor.process_pooling(name, prompt, params, **terms)]
        return self.input_processor.process(name, prompt, params, **terms)

    def abort(self, labels: str | Iterable[str]) -> list[Outgoing]:
        """End all requests of these labels with finish_reason "abort"; unknown labels are ignored."""
        return self._end(self._flights.labelled(labels), "abort")

    def release(self, name: str) -> list[Outgoing]:
        """Nobody wants more of this request; one that has ended is fine."""
        return self._end(self._flights.named(name), "abort")

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do; None if no request has a deadline."""
        return self._flights.next_deadline

    def expire(self, now: float) -> list[Outgoing]:
        """End the requests whose deadline has come with finish_reason "timeout"."""
        messages: list[Outgoing] = []
        for core_ids in self._flights.take_due(now):
            messages += self._end(core_ids, "timeout")
        return messages

    # Cores

    def take_in(self, core: int, message: CoreMessage) -> list[Outgoing]:
        """Act on a core's message."""
        if isinstance(message, EngineCoreOutputs):
            now = message.timestamp or self.clock()
            ends, stats = self.output_processor.process(message, now)
            messages = self._beam_searches.process(message.updates, now, stats)
            stats.spent_in_vain = message.spent
            self.stat_loggers.record(stats, message.stats, core)
            self.router.heard(update.request_id for update in message.updates)
            if message.stats is not None:
                self.router.observe(core, message.stats)
            if message.cache is not None:
                self.router.cached(core, message.cache)
            messages += [AbortRequests(ids, reason) for reason, ids in ends.items()]
            return [(core, one) for one in messages]
        if isinstance(message, UtilityResult):
            self._calls.answer(message)
        elif isinstance(message, CoreReady):
            self._ready[core] = message
            self.router.ready(core, message.num_blocks, message.block_size)
            self._settle()
            self.stat_loggers.core_ready(core, self.config, message.num_blocks)
        return []

    def call(self, core: int, method: str, *args: Any) -> tuple[Future[Any], list[Outgoing]]:
        """Call a utility of a core. The future's error is an `EngineError` if the core refused, or the engine's end.

        Raises:
            QuireError: the engine is dead.
        """
        self.check_health()
        answer, message = self._calls.start(core, method, args)
        return answer, [(core, message)]

    def check_can_sleep(self) -> None:
        """Raises UnavailableError: a core is loading; ConflictError: cores need each other in every step."""
        self.check_health()
        if self.config.parallel.shares_experts:
            raise ConflictError("replicas that share experts (--enable-expert-parallel) cannot sleep")
        if self.core_ready is None:
            raise UnavailableError("the engine cannot sleep before it is ready", retry_after=2)

    def sleep(self, level: int) -> tuple[list[Future[Any]], list[Outgoing]]:
        """Put all cores to sleep, with the requests that they have; a core that takes another's place sleeps, too.

        Raises:
            UnavailableError: a core is not ready.
        """
        self.check_can_sleep()
        self.rest = self.rest.deeper(level)
        return self._call_all("sleep", level)

    def wake_up(self, tags: Sequence[str]) -> tuple[Rest, list[Future[Any]], list[Outgoing]]:
        """Wake all cores; the `Rest` is to be kept as `rest` once they have answered.

        Raises:
            ConflictError: one of the tags needs what would still sleep.
        """
        self.check_health()
        self.dozes = False
        return self.rest.without(tags), *self._call_all("wake_up", list(tags))

    def _call_all(self, method: str, *args: Any) -> tuple[list[Future[Any]], list[Outgoing]]:
        calls = [self._calls.start(core, method, args) for core in range(len(self._ready))]
        return [call for call, _ in calls], [(core, message) for core, (_, message) in enumerate(calls)]

    def in_flight(self, core: int) -> dict[str, list[str]]:
        """Name of each request that this core has -> core ids of its sequences."""
        return self._flights.on(core)

    def in_flight_elsewhere(self, core: int) -> set[str]:
        """Names of the requests that other cores have."""
        return self._flights.names() - self.in_flight(core).keys()

    def lose(self, core: int, failed: Iterable[str], error: QuireError) -> list[Outgoing]:
        """A core is gone and another will take its place; these of its requests, by name, end with this error.

        The others go on at once where there are cores that are awake, else in the core that is to come.
        """
        self._ready[core] = None
        self.router.lost(core)
        failed = list(failed)
        self._fail(core, [core_id for name in failed for core_id in self._flights.named(name)], error)
        left = self.in_flight(core)
        self.stat_loggers.core_died(core, len(left), len(failed))
        cores = [] if self.rest else self.cores_up
        return [one for name in left for one in self._move(name, cores)] if cores else []

    def unfinished(self, core: int) -> list[Outgoing]:
        """What to send to a core that takes the place of this one: all that the old one has left undone.

        Each request goes on after the tokens that have come, and gets the same tokens, logprobs and text as if nothing
        had happened. No message of the old core may be taken in any more.
        """
        owed = self._calls.owed_by(core)
        verbs = self.rest.verbs() if self._is_first else []
        messages: list[CoreRequest] = [self._calls.start(core, method, args)[1] for method, args in verbs]
        messages += [one for core_ids in self.in_flight(core).values() for one in self._resumed(core_ids)]
        messages += owed
        return [(core, message) for message in messages]

    def die(self, error: QuireError) -> None:
        """The engine has ended: every request and every call in flight ends with this error; only the first counts."""
        if self.dead_error is not None:
            return
        self.dead_error = error
        for core in range(len(self._ready)):
            self._fail(core, [core_id for ids in self.in_flight(core).values() for core_id in ids], error)
        self._calls.fail_all(error)

    # The rest

    def _watched(self, name: str, sink: Sink) -> Sink:
        """The sink, and the request is forgotten with its last output."""

        def deliver(output: Any) -> None:
            if isinstance(output, Exception) or output.finished:
                self._flights.land(name)
                self.router.end(name)
            sink(output)

        return deliver

    def _move(self, name: str, cores: Sequence[int]) -> list[Outgoing]:
        """A request goes on on one of these cores."""
        core = self.router.move(name, cores)
        self._flights.move(name, core)
        return [(core, message) for message in self._resumed(self._flights.named(name))]

    def _resumed(self, core_ids: Sequence[str]) -> list[CoreRequest]:
        """What a core must be asked for that is to go on with a request."""
        found = [owner.resume(core_ids) for owner in (self.output_processor, self._beam_searches)]
        return [add_message(requests) for requests in found if requests]

    def _end(self, core_ids: Sequence[str], reason: str) -> list[Outgoing]:
        """End these sequences, which are in flight, and tell their cores."""
        messages: list[Outgoing] = []
        for core, theirs in self._flights.by_core(core_ids).items():
            now = self.clock()
            ends, stats = self.output_processor.end(theirs, reason, now)
            if beams := self._beam_searches.end(theirs, reason, now, stats):
                ends[reason] = [*ends.get(reason, ()), *beams]
            if ends:
                self.stat_loggers.record(stats, None, core)
            messages += [(core, AbortRequests(ended, why)) for why, ended in ends.items()]
        return messages

    def _fail(self, core: int, core_ids: list[str], error: QuireError) -> None:
        """End the requests of these sequences of a core with an error."""
        if core_ids:
            now = self.clock()
            stats = self.output_processor.fail(core_ids, error, now)
            self._beam_searches.fail(core_ids, error, now, stats)
            self.stat_loggers.record(stats, None, core)

    def _settle(self) -> None:
        """Go on with the shortest context that a core has fitted to its memory."""
        ready = [one for one in self._ready if one is not None]
        if len(ready) == len(self._ready):
            self.config = self.config.evolve(max_model_len=min(one.max_model_len for one in ready))
            self.input_processor.settle(self.config)


def explained(found: Iterable[Any], label: str) -> list[Explanation]:
    """What the cores said about the sequences of a request, as it came over the wire, less those they do not know.

    Raises:
        NotFoundError: none of them is known.
    """
    known = [msgspec.convert(one, Explanation) for one in found if one is not None]
    if not known:
        raise NotFoundError(f"no request {label!r:.100} is known to the engine", param="request_id")
    return known


def _check_timeout(timeout_s: float | None, config: EngineConfig) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValidationError(
            f"timeout_s must be a positive number of seconds, got {timeout_s!r}", param="timeout_s"
        )
    if config.parallel.distributed_executor_backend == LAUNCHED:
        raise ValidationError(
            f"timeout_s is not for ranks of {LAUNCHED}, each of which would end the request by a clock of its own; "
            "max_tokens limits it on all of them alike",
            param="timeout_s",
        )
