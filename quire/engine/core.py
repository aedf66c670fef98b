"""`EngineCore`: one scheduler, one executor, and the loop that joins them.

Invariant: only this module owns both columns of the system. It knows token ids and blocks, never text, HTTP or
processes; whoever holds it calls `handle` for each message and `step` while there is work. A core in which one of these
failed is dead: nothing is done after a step that was not carried out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.adapter_holds import AdapterHolds
from quire.engine.cache_news import CacheNotes
from quire.engine.file_states import check_files
from quire.engine.grammar_holds import GrammarHolds
from quire.engine.kv_events import create_publisher
from quire.engine.lockstep import Lockstep, in_step
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    StepBegun,
    UtilityCall,
    UtilityResult,
    request_of,
)
from quire.engine.progress import Progress, followed
from quire.engine.recorder import recorded
from quire.engine.sleeper import Sleeper
from quire.engine.step_loop import Clock, make_loop
from quire.engine.trace import create_trace
from quire.engine.vocabulary import load_vocabulary
from quire.errors import ClientError, EngineDeadError, StartupError
from quire.executor.base import Executor, resolve_executor
from quire.kv_cache.sizing import settle_max_model_len, size_kv_cache
from quire.models.registry import is_own_class
from quire.plugins import GENERAL, load_general_plugins, plugin_names
from quire.scheduler.explain import Explanation
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import resolve_scheduler
from quire.torch_import import import_deferred

logger = logging.getLogger(__name__)

VITAL = frozenset({"sleep", "wake_up"})
"""Utilities that leave scheduler and worker apart when they fail in the middle."""


class EngineCore:
    """Loads the model, sizes the cache, then turns requests into updates step by step.

    Every time that it states is of `clock`, which requests' `arrival_time` must share. What it works on is written to
    `progress`, if there is one. With `lockstep` it takes its steps together with other replicas.

    Raises:
        StartupError: the model cannot be loaded or its files changed meanwhile, or memory does not suffice for one
            request.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock = time.monotonic,
        progress: Progress | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        started = clock()
        self._clock = clock
        self._failure: BaseException | None = None
        if not _computes_by_itself(config):
            import_deferred()
        load_general_plugins()
        scheduler_class = resolve_scheduler(config.scheduler.scheduler_cls)
        self.executor: Executor = resolve_executor(config.parallel.distributed_executor_backend)(config)
        with _shut_down_on_error(self.executor):
            self.executor.load()
            check_files(config)
            kv_config = size_kv_cache(config, self.executor.kv_cache_specs(), self.executor.kv_memory())
            config = settle_max_model_len(config, kv_config)
            self.executor.initialize_kv_cache(kv_config)
        self.scheduler = scheduler_class(config, kv_config)
        self._publisher = create_publisher(config)
        self._cache_notes = CacheNotes() if config.tells_cache else None
        self._trace = create_trace(config, kv_config)
        if self._trace is not None:
            self.scheduler = recorded(self.scheduler, self._trace)
        self.executor.use_vocabulary(partial(load_vocabulary, config))
        self._grammars = GrammarHolds(self.executor, self.scheduler)
        self._adapters = AdapterHolds(config.lora, self.executor, self.scheduler)
        self._lockstep = lockstep
        executor = self.executor
        if progress is not None:
            executor = followed(executor, progress, is_alone=lockstep is None)
        executor = executor if lockstep is None else in_step(executor, lockstep)
        self._loop = make_loop(config.scheduler, self.scheduler, executor, clock)
        sleeper = Sleeper(
            self.scheduler,
            self.executor,
            self._loop,
            clock,
            self._tell,
            progress,
            partial(check_files, config),
        )
        self.utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "check_integrity": self.scheduler.check_integrity,
            "stats": self.scheduler.stats,
            "explain": self.explain,
            "sleep": sleeper.sleep,
            "wake_up": sleeper.wake_up,
            "add_lora": self._adapters.add,
            "remove_lora": self._adapters.remove,
            "list_loras": self._adapters.numbers,
        }
        self._late: list[tuple[UtilityCall, Future[Any]]] = []
        self._untold: list[RequestUpdate] = []
        self.ready = CoreReady(
            num_blocks=kv_config.num_blocks,
            block_size=kv_config.block_size,
            kv_cache_bytes=kv_config.bytes,
            max_model_len=config.model.max_model_len,
            load_s=clock() - started,
        )

    def has_work(self) -> bool:
        """True while a step would do something, be it to say that the core is dead."""
        is_provided = self._grammars.any_ready or self._adapters.any_ready
        has_news = bool(self._untold) or is_provided or self._failure is not None
        is_behind = self._lockstep is not None and self._lockstep.is_behind
        return has_news or is_behind or self.scheduler.has_work()

    @property
    def patience_s(self) -> float | None:
        """How long a core without work may be left alone; None: until there is a message for it."""
        return self._grammars.patience_s or self._adapters.patience_s

    def step(self) -> EngineCoreOutputs:
        """One turn of the loop; returns every request's news.

        Raises:
            EngineDeadError: the core failed before.
        """
        with self._all_or_dead():
            self._grammars.release_ready(self._clock())
            self._tell(self._adapters.release_ready(self._clock()))
            updates, self._untold = self._untold + self._take_step(), []
            self._publish_events()
            news = None if self._cache_notes is None else self._cache_notes.take()
            return EngineCoreOutputs(updates, self.scheduler.stats(), self._clock(), cache=news)

    def take_answers(self) -> list[UtilityResult]:
        """The answers of utility calls that took their time; a step may bring some."""
        done = [(call, future) for call, future in self._late if future.done()]
        self._late = [(call, future) for call, future in self._late if not future.done()]
        answers = [self._answer(call, future.result) for call, future in done]
        return [answer for answer in answers if answer is not None]

    def handle(self, message: CoreRequest) -> CoreMessage | None:
        """Act on one message. Utility calls have an answer, at once or by `take_answers`; of what is aborted is told
        what it has cost.

        Raises:
            EngineDeadError: the core failed before.
        """
        with self._all_or_dead():
            if isinstance(message, AddRequest):
                for request in message.requests():
                    self.add_request(request)
            elif isinstance(message, AbortRequests):
                return self._abort(message)
            elif isinstance(message, UtilityCall):
                return self._call_utility(message)
            elif isinstance(message, StepBegun) and self._lockstep is not None:
                self._lockstep.hear(message)
            return None

    def _abort(self, message: AbortRequests) -> EngineCoreOutputs | None:
        now = self._clock()
        spent = self.scheduler.spent_in_vain(message.request_ids)
        self.scheduler.finish_requests(message.request_ids, message.reason, now)
        return EngineCoreOutputs([], None, now, spent) if spent else None

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; one that can never run ends with an error at the next step, and costs only itself."""
        try:
            holds = [*self._grammars.of(message.sampling_params), *self._adapters.of(message.lora_request)]
            self.scheduler.add_request(request_of(message), self._clock(), holds)
        except ClientError as error:
            refusal = RequestUpdate(
                message.request_id, [], finish_reason="error", error=str(error), refused=True
            )
            self._tell([refusal])

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits or waited; None if the core does not know it."""
        return self.scheduler.explain(request_id, self._clock())

    def shutdown(self) -> None:
        self.executor.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._trace is not None:
            self._trace.close()

    @contextmanager
    def _all_or_dead(self) -> Iterator[None]:
        """What ends in the middle leaves scheduler and worker apart, so it is the last that is done."""
        if self._failure is not None:
            name = type(self._failure).__name__
            raise EngineDeadError(f"the engine failed before ({name}) and cannot go on") from self._failure
        try:
            yield
        except BaseException as failure:
            self._failure = failure
            raise

    def _tell(self, updates: list[RequestUpdate]) -> None:
        """Publish this with the next step."""
        self._untold += updates

    def _take_step(self) -> list[RequestUpdate]:
        """A step of this core's requests, or else, if others have begun one, for theirs alone."""
        if self._lockstep is None:
            return self._loop.step()
        before = self._lockstep.begun
        updates = self._loop.step()
        if self._lockstep.is_behind and self._lockstep.begun == before:
            self._lockstep.begin()
            self.executor.take_part()
        return updates

    def _call_utility(self, call: UtilityCall) -> UtilityResult | None:
        if call.method not in self.utilities:
            return UtilityResult(call.call_id, error=f"the core has no utility {call.method!r}")
        return self._answer(call, partial(self.utilities[call.method], *call.args))

    def _answer(self, call: UtilityCall, work: Callable[[], Any]) -> UtilityResult | None:
        """What comes of a call, None while it is not done; one that fails costs only itself, unless it is vital."""
        try:
            result = work()
            if isinstance(result, Future) and not result.done():
                self._late.append((call, result))
                return None
            result = msgspec.to_builtins(result.result() if isinstance(result, Future) else result)
        except ClientError as error:
            return UtilityResult(call.call_id, error=str(error), refused=True)
        except Exception as error:
            if call.method in VITAL and not isinstance(error, StartupError):
                raise
            logger.exception("the utility %r failed", call.method)
            what = f"{type(error).__name__}; see the engine core's log for the traceback"
            return UtilityResult(call.call_id, error=f"the utility {call.method!r} failed: {what}")
        self._publish_events()  # there may be no step for long
        return UtilityResult(call.call_id, result=result)

    def _publish_events(self) -> None:
        """Tell subscribers what happened to the prefix cache, and note it for those who choose among cores."""
        if self._publisher is None and self._cache_notes is None:
            return
        events = self.scheduler.take_kv_events()
        if events and self._cache_notes is not None:
            self._cache_notes.note(events)
        if events and self._publisher is not None:
            self._publisher.publish(events, time.time())


def _computes_by_itself(config: EngineConfig) -> bool:
    """Whether only quire's own code computes, and on a CPU: it neither traces nor needs meta kernels in Python."""
    is_own = is_own_class(config.model_class) and not plugin_names(GENERAL)
    return is_own and config.device.device == "cpu"


@contextmanager
def _shut_down_on_error(executor: Executor) -> Iterator[None]:
    """What an executor has begun, such as processes, does not wait for a core that will not be."""
    try:
        yield
    except BaseException:
        executor.shutdown()
        raise
