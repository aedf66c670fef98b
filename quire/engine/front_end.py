# SPDX-License-Identifier: Apache-2.0
"""Transport-free front end of an engine: core messages in, messages for cores out.

Invariant: no socket, no thread, no event loop, and time comes from the given clock. Every method that changes
something returns the messages to send, each with its core's index, and the caller sends them in that order.
A request belongs to one core at a time, its forks to the same one, and it is tracked until its last
output (or the error that ended the engine) has gone to its sink.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict

import msgspec

from quire.adapters import AdapterContents, AdapterRequest
from quire.config import EngineConfig
from quire.engine.core_choice import make_core_choice
from quire.engine.file_states import check_files
from quire.engine.in_flight_requests import CallerRequest, InFlightRequests
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
from quire.engine.output_processor import OutputProcessor, Sink
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.rank_checks import LAUNCHED
from quire.engine.request_owner import request_owners
from quire.engine.sleep_state import EngineSleepState
from quire.engine.startup import load_tokenizer
from quire.engine.utility_calls import UtilityCalls
from quire.errors import ConflictError, NotFoundError, QuireError, UnavailableError, ValidationError
from quire.features import ADAPTER_CONTENTS, MEDIA_ADAPTERS
from quire.kv_cache.hashing import extra_keys
from quire.metrics.stats import STAT_LOGGERS, StatLoggerGroup
from quire.metrics.tracing import make_tracers
from quire.models.gguf.model import forget_files
from quire.plugins import import_place
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.explain import Explanation

logger = logging.getLogger(__name__)


Outgoing = tuple[int, CoreRequest]  # (core index, message)


class RequestSettings(TypedDict):
    """Per-request settings: priority, tenant, adapter."""

    priority: int
    tenant: str
    adapter_request: AdapterRequest | None


class FrontEnd:
    """Requests, updates and utility calls of one engine with `num_cores` cores.

    Args:
        config: as resolved by `prepare`.
        takes_callables: see `InputProcessor`.
        clock: monotonic seconds, the same clock as the cores'.
        number: of this front end among its cores' front ends.
        stalls: whether a core seems to hang, so that others are preferred.

    Attributes:
        config: with the resolved context length, once all cores are ready.
        dead_error: error that ended the engine.
        rest: sleep state; only the first front end puts cores to sleep and informs the others.
        is_falling_asleep: whether it takes no requests because it is about to sleep.

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
            config, self.tokenizer, takes_callables=takes_callables, clock=clock
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self._owners = request_owners(self.tokenizer)
        plugged_in = [make(config) for make in STAT_LOGGERS.resolve_all()]
        self.stat_loggers = StatLoggerGroup([*make_tracers(config), *plugged_in])
        self.dead_error: QuireError | None = None
        self._rest = EngineSleepState()
        self.is_falling_asleep = False
        self._is_first = number == 0
        self._ready: list[CoreReady | None] = [None] * num_cores
        self._in_flight = InFlightRequests(num_cores, number)
        self.router = make_core_choice(config, num_cores)
        self._calls = UtilityCalls(number)
        reads_contents = config.serves_adapters and config.kv_store.moves_rows
        self._contents: AdapterContents | None = (
            import_place(ADAPTER_CONTENTS)(config) if reads_contents else None
        )
        self._media_adapters = (
            import_place(MEDIA_ADAPTERS)(config, self.completed_adapter)
            if config.lora.default_mm_loras
            else None
        )

    # State

    def __contains__(self, label: str) -> bool:
        """Return whether a request of this label is unfinished."""
        return label in self._in_flight

    def __len__(self) -> int:
        """Return the number of labels of unfinished requests."""
        return len(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Sequences whose finish has not been published yet."""
        further = sum(owner.num_unfinished for owner in self._owners.values())
        return self.output_processor.num_unfinished + further

    @property
    def core_ready(self) -> CoreReady | None:
        """Ready message of the first core, once all are ready."""
        return self._ready[0] if None not in self._ready else None

    @property
    def stalls(self) -> bool:
        """True if a core is ready and every ready core seems to hang."""
        return not self.cores_up and any(ready is not None for ready in self._ready)

    @property
    def cores_up(self) -> list[int]:
        """Cores that have loaded and do not seem to hang."""
        return [
            core for core, ready in enumerate(self._ready) if ready is not None and not self._stalls(core)
        ]

    @property
    def cores_to_query(self) -> Sequence[int]:
        """Cores to query: those that are up, or all of them if none is."""
        return self.cores_up or range(len(self._ready))

    def expects(self, core: int) -> bool:
        """Return whether a core must send more messages: it is awake and has requests, or owes an answer."""
        return bool((self._in_flight.num_on(core) and not self.rest) or self._calls.unanswered_by(core))

    def labels(self) -> list[str]:
        """Return labels of unfinished requests, oldest first."""
        return self._in_flight.labels()

    def locate_sequences(self, label: str) -> list[tuple[int, str]]:
        """Return (core, core id) of each sequence of a label's requests in flight, else of its last finished one.

        The core of a finished request is not remembered, so all available cores are listed.
        """
        names = self._in_flight.known(label)
        if label in self._in_flight:
            return [
                (core, name) for core, theirs in self._in_flight.by_core(names).items() for name in theirs
            ]
        return [(core, name) for core in self.cores_to_query for name in names]

    def check_health(self) -> None:
        """Raise the error that ended the engine, if it ended."""
        if self.dead_error is not None:
            raise self.dead_error

    @property
    def rest(self) -> EngineSleepState:
        """Sleep state of the engine."""
        return self._rest

    @rest.setter
    def rest(self, rest: EngineSleepState) -> None:
        self._rest = rest
        self.stat_loggers.rested(rest.state)

    def check_awake(self) -> None:
        """Raise UnavailableError if the engine sleeps."""
        if self.rest.refuses or self.is_falling_asleep:
            raise UnavailableError("the engine sleeps and takes no requests until it is woken", retry_after=2)

    # Requests

    def completed_adapter(self, request: AdapterRequest | None) -> AdapterRequest | None:
        """Return an adapter with the digest of its content where cached blocks may outlive the process.

        It reads the adapter's files unless `has_completed`.
        """
        return request if request is None or self._contents is None else self._contents.completed(request)

    def has_completed(self, request: AdapterRequest | None) -> bool:
        """Return whether `completed_adapter` reads no files."""
        return request is None or self._contents is None or self._contents.is_complete(request)

    def submit(
        self,
        label: str,
        prompt: TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        sink: Sink,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter_request: AdapterRequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        arrived: float | None = None,
    ) -> tuple[str, list[Outgoing]]:
        """Validate a request and assign it to a core, by the router or to the replica `data_parallel_rank`.

        The timeout of `timeout_s` seconds counts from `arrived` on the engine's clock; None: now. `trace_headers` are
        returned in the final statistics. Returns a unique name for `release`, and the messages to send.

        Raises:
            ValidationError: the prompt or a parameter is invalid; nothing was queued.
            UnavailableError: the engine sleeps.
            QuireError: the engine is dead, even if it died while the prompt was tokenized.
        """
        self.check_health()
        self.check_awake()
        _check_timeout(timeout_s, self.config)
        cores = self._cores_for(data_parallel_rank)
        name = self._in_flight.new_name(label)
        tracked_sink = self._with_removal(name, sink)
        adapter_request = self.completed_adapter(adapter_request)
        if self._media_adapters is not None:
            adapter_request = self._media_adapters.adapter_of(prompt.media, adapter_request)
        terms = RequestSettings(priority=priority, tenant=tenant, adapter_request=adapter_request)
        owner = self._owners.get(type(params))
        if owner is not None:
            core_ids, messages = owner.submit(
                self.input_processor, name, label, prompt, params, terms, tracked_sink, trace_headers
            )
        else:
            requests = self._checked(name, prompt, params, terms)
            self.output_processor.add_request(label, prompt, requests, tracked_sink, trace_headers)
            core_ids, messages = [one.request_id for one in requests], [add_message(requests)]
        adapter = None if adapter_request is None else adapter_request.cache_key
        keys = extra_keys(prompt.cache_salt, adapter, prompt.media)
        core = self.router.admit(name, prompt.token_ids, len(core_ids), keys, core_ids[0], cores)
        came = self.clock() if arrived is None else arrived
        deadline = None if timeout_s is None else came + timeout_s
        self._in_flight.add(name, CallerRequest(label, core, core_ids), deadline)
        return name, [(core, message) for message in messages]

    def _cores_for(self, replica: int | None) -> Sequence[int]:
        """Return the cores among which the router chooses; a replica that is down is ignored."""
        if replica is None:
            return self.cores_to_query
        served = self.config.parallel.served
        if replica not in served:
            raise ValidationError(
                f"data_parallel_rank is {replica}, and replicas here are {', '.join(map(str, served))}",
                param="data_parallel_rank",
            )
        core = served.index(replica)
        return [core] if core in self.cores_to_query else self.cores_to_query

    def _checked(
        self,
        name: str,
        prompt: TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        terms: RequestSettings,
    ) -> list[EngineCoreRequest]:
        if isinstance(params, PoolingParams):
            return [self.input_processor.process_pooling(name, prompt, params, **terms)]
        if isinstance(params, BeamSearchParams):
            raise ValidationError("this installation has no beam search (quire.beam_search)", param="params")
        return self.input_processor.process(name, prompt, params, **terms)

    def abort(self, labels: str | Iterable[str]) -> list[Outgoing]:
        """End all requests of these labels with finish_reason "abort"; unknown labels are ignored."""
        return self._end(self._in_flight.labeled(labels), "abort")

    def release(self, name: str) -> list[Outgoing]:
        """Abort a request that nobody reads any more; finished ones are ignored."""
        return self._end(self._in_flight.named(name), "abort")

    @property
    def next_deadline(self) -> float | None:
        """Time at which `expire` has something to do; None if no request has a deadline."""
        return self._in_flight.next_deadline

    def expire(self, now: float) -> list[Outgoing]:
        """Finish the requests whose deadline has passed with finish_reason "timeout"."""
        messages: list[Outgoing] = []
        for core_ids in self._in_flight.pop_due(now):
            messages += self._end(core_ids, "timeout")
        return messages

    # Cores

    def take_in(self, core: int, message: CoreMessage) -> list[Outgoing]:
        """Handle a core's message."""
        if isinstance(message, EngineCoreOutputs):
            now = message.timestamp or self.clock()
            ends, stats = self.output_processor.process(message, now)
            messages: list[CoreRequest] = []
            for owner in self._owners.values():
                messages += owner.process(message.updates, now, stats)
            stats.wasted_prompt_tokens = message.spent
            self.stat_loggers.record(stats, message.stats, core)
            self.router.mark_updated(update.request_id for update in message.updates)
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
            self._resolve_max_model_len()
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
        """Raise UnavailableError if a core is loading; ConflictError if cores need each other in every step."""
        self.check_health()
        if self.config.parallel.shares_experts:
            raise ConflictError("replicas that share experts (--enable-expert-parallel) cannot sleep")
        if self.core_ready is None:
            raise UnavailableError("the engine cannot sleep before it is ready", retry_after=2)

    def sleep(self, level: int, *, admits: bool = False) -> tuple[list[Future[Any]], list[Outgoing]]:
        """Put all cores to sleep, with their requests; a replacement core sleeps, too. `admits`: new ones are queued.

        Raises:
            UnavailableError: a core is not ready.
        """
        self.check_can_sleep()
        self.rest = self.rest.deeper(level, admits=admits)
        return self.call_all("sleep", level)

    def wake_up(self, tags: Sequence[str]) -> tuple[EngineSleepState, list[Future[Any]], list[Outgoing]]:
        """Wake all cores; the returned sleep state is to be stored as `rest` once they have answered.

        Raises:
            ConflictError: a tag needs another one that would still sleep.
        """
        self.check_health()
        self.is_falling_asleep = False
        return self.rest.without(tags), *self.call_all("wake_up", list(tags))

    def call_all(self, method: str, *args: Any) -> tuple[list[Future[Any]], list[Outgoing]]:
        """Call a utility of every core, each of which will answer."""
        calls = [self._calls.start(core, method, args) for core in range(len(self._ready))]
        return [call for call, _ in calls], [(core, message) for core, (_, message) in enumerate(calls)]

    def in_flight(self, core: int) -> dict[str, list[str]]:
        """Return request name -> core ids, for the requests of this core."""
        return self._in_flight.on(core)

    def in_flight_elsewhere(self, core: int) -> set[str]:
        """Return names of the requests on other cores."""
        return self._in_flight.names() - self.in_flight(core).keys()

    def lose(self, core: int, failed: Iterable[str], error: QuireError) -> list[Outgoing]:
        """Handle a core's loss: requests `failed`, by name, end with this error.

        The others resume at once on awake cores, if there are any, else on the core's replacement.
        """
        self._ready[core] = None
        self.router.lost(core)
        failed = list(failed)
        self._fail(core, [core_id for name in failed for core_id in self._in_flight.named(name)], error)
        left = self.in_flight(core)
        self.stat_loggers.core_died(core, len(left), len(failed))
        cores = [] if self.rest else self.cores_up
        return [one for name in left for one in self._move(name, cores)] if cores else []

    def unfinished(self, core: int) -> list[Outgoing]:
        """Return the messages that transfer all unfinished work to a core's replacement.

        Each request resumes after its tokens so far, and gets the same tokens, logprobs and text as without
        interruption. No message of the old core may be handled any more.
        """
        owed = self._calls.unanswered_by(core)
        verbs = self.rest.verbs() if self._is_first else []
        messages: list[CoreRequest] = [self._calls.start(core, method, args)[1] for method, args in verbs]
        messages += [one for core_ids in self.in_flight(core).values() for one in self._resumed(core_ids)]
        messages += owed
        return [(core, message) for message in messages]

    def die(self, error: QuireError) -> None:
        """End the engine: every request and call in flight fails with this error; only the first counts."""
        if self.dead_error is not None:
            return
        self.dead_error = error
        for core in range(len(self._ready)):
            self._fail(core, [core_id for ids in self.in_flight(core).values() for core_id in ids], error)
        self._calls.fail_all(error)

    # Internals

    def _with_removal(self, name: str, sink: Sink) -> Sink:
        """Wrap the sink so that the request is removed with its last output."""

        def deliver(output: Any) -> None:
            if isinstance(output, Exception) or output.finished:
                self._in_flight.remove(name)
                self.router.finish(name)
            sink(output)

        return deliver

    def _move(self, name: str, cores: Sequence[int]) -> list[Outgoing]:
        """Move a request to one of these cores."""
        core = self.router.move(name, cores)
        self._in_flight.move(name, core)
        return [(core, message) for message in self._resumed(self._in_flight.named(name))]

    def _resumed(self, core_ids: Sequence[str]) -> list[CoreRequest]:
        """Return the messages that make a core resume a request."""
        found = [self.output_processor.resume(core_ids)]
        found += [owner.resume(core_ids) for owner in self._owners.values()]
        return [add_message(requests) for requests in found if requests]

    def _end(self, core_ids: Sequence[str], reason: str) -> list[Outgoing]:
        """Finish these in-flight sequences and abort them on their cores."""
        messages: list[Outgoing] = []
        for core, theirs in self._in_flight.by_core(core_ids).items():
            now = self.clock()
            ends, stats = self.output_processor.end(theirs, reason, now)
            for owner in self._owners.values():
                if more := owner.end(theirs, reason, now, stats):
                    ends[reason] = [*ends.get(reason, ()), *more]
            if ends:
                self.stat_loggers.record(stats, None, core)
            messages += [(core, AbortRequests(ended, why)) for why, ended in ends.items()]
        return messages

    def _fail(self, core: int, core_ids: list[str], error: QuireError) -> None:
        """Fail the requests of these sequences of a core."""
        if core_ids:
            now = self.clock()
            stats = self.output_processor.fail(core_ids, error, now)
            for owner in self._owners.values():
                owner.fail(core_ids, error, now, stats)
            self.stat_loggers.record(stats, None, core)

    def _resolve_max_model_len(self) -> None:
        """Adopt the shortest context that a core has fitted to its memory, once all are ready."""
        ready = [one for one in self._ready if one is not None]
        if len(ready) == len(self._ready):
            self.config = self.config.evolve(max_model_len=min(one.max_model_len for one in ready))
            self.input_processor.update_config(self.config)


def decode_explanations(found: Iterable[Any], label: str) -> list[Explanation]:
    """Decode the cores' explanations of a request's sequences; None entries are dropped.

    Raises:
        NotFoundError: the request is unknown.
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
