# SPDX-License-Identifier: Apache-2.0
"""Engine core: one scheduler, one executor, and the loop that joins them.

Invariant: only this module owns both the scheduler and the executor. It handles token ids and blocks, never text, HTTP
or processes. Its owner calls `handle` for each message and `step` while there is work. After a failure of either the
core is dead: no step follows one that was not executed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.core_feature import core_features, users_of
from quire.engine.core_progress import ProgressFile
from quire.engine.file_states import check_files, states_of
from quire.engine.kv_events import create_publisher
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CacheDelta,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    StepStarted,
    UtilityCall,
    UtilityResult,
    request_of,
)
from quire.engine.replicas.lockstep import Lockstep, in_step
from quire.engine.step_loop import Clock, make_loop
from quire.engine.supervision import supervision
from quire.engine.trace import create_trace, recorded
from quire.errors import ClientError, EngineDeadError, StartupError
from quire.executor.base import Executor, resolve_executor
from quire.kv_cache.sizing import resolve_max_model_len, size_kv_cache
from quire.plugins import load_general_plugins
from quire.scheduler.explain import Explanation
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import resolve_scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Engine core: loads the model, sizes the cache, then turns requests into updates step by step.

    All times are of `clock`, which the requests' `arrival_time` must share. Requests being worked on are recorded in
    `progress`, if given. With `lockstep` it steps together with other replicas.

    Raises:
        StartupError: the model cannot be loaded or its files changed meanwhile, or memory does not suffice for one
            request.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock = time.monotonic,
        progress: ProgressFile | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        started = clock()
        self._clock = clock
        self._failure: BaseException | None = None
        load_general_plugins()
        scheduler_class = resolve_scheduler(config.scheduler.scheduler_cls)
        self.executor: Executor = resolve_executor(config.parallel.distributed_executor_backend)(config)
        if progress is not None:
            self.executor.note_loading = progress.note_loading
        with _shut_down_on_error(self.executor):
            self.executor.note_loading("weights")
            self.executor.load()
            check_files(config)
            kv_config = size_kv_cache(config, self.executor.kv_cache_specs(), self.executor.kv_memory())
            config = resolve_max_model_len(config, kv_config)
            self.executor.note_loading("kv_cache")
            self.executor.initialize_kv_cache(kv_config)
            self.scheduler = scheduler_class(config, kv_config)
            self._trace = create_trace(config, kv_config)
            if self._trace is not None:
                self.scheduler = recorded(self.scheduler, self._trace)
            self._features = core_features(config, self.executor, self.scheduler, clock)
            self._publisher = create_publisher(config)
        self._with_work = users_of("has_work", self._features)
        self._advancing = users_of("advance", self._features)
        self._stepped = users_of("stepped", self._features)
        self._with_stats = users_of("add_stats", self._features)
        self._event_readers = [feature for feature in self._features if feature.reads_kv_events]
        self.progress = progress
        self._lockstep = lockstep
        self._config = config
        executor = self.executor
        if progress is not None:
            executor = supervision().observed(executor, progress, is_alone=lockstep is None)
        executor = executor if lockstep is None else in_step(executor, lockstep)
        self._loop = make_loop(config.scheduler, self.scheduler, executor, clock)
        for feature in self._features:
            feature.connect(self)
        self.utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._reset_prefix_cache,
            "check_integrity": self.scheduler.check_integrity,
            "stats": self.scheduler.stats,
            "explain": self.explain,
            "run_on_worker": self.executor.run_on_worker,
            "call_workers": self.executor.call_workers,
        }
        for feature in self._features:
            self.utilities.update(feature.utilities)
        self._vital = frozenset(name for feature in self._features for name in feature.vital)
        self._pending_calls: list[tuple[UtilityCall, Future[Any]]] = []
        self._pending_updates: list[RequestUpdate] = []
        self.ready = CoreReady(
            num_blocks=kv_config.num_blocks,
            block_size=kv_config.block_size,
            kv_cache_bytes=kv_config.bytes,
            max_model_len=config.model.max_model_len,
            load_s=clock() - started,
        )

    def has_work(self) -> bool:
        """Return whether a step would do something, including reporting that the core is dead."""
        has_output = bool(self._pending_updates) or self._failure is not None
        is_behind = self._lockstep is not None and self._lockstep.is_behind
        return (
            has_output or is_behind or self.scheduler.has_work() or any(f.has_work for f in self._with_work)
        )

    @property
    def patience_s(self) -> float | None:
        """Longest idle wait in seconds; None: until a message arrives."""
        waits = [wait for feature in self._features if (wait := feature.patience_s) is not None]
        return min(waits, default=None)

    def step(self) -> EngineCoreOutputs:
        """Run one iteration of the loop; returns the updates of all requests.

        Raises:
            EngineDeadError: the core failed before.
        """
        with self._fail_core_on_error():
            for feature in self._advancing:
                self._queue_updates(feature.advance())
            updates, self._pending_updates = self._pending_updates + self._take_step(), []
            stats = self.scheduler.stats()
            for feature in self._stepped:
                feature.stepped(updates)
            for feature in self._with_stats:
                feature.add_stats(stats)
            self._publish_events()
            return EngineCoreOutputs(updates, stats, self._clock(), cache=self._pop_cache_delta())

    def pop_answers(self) -> list[UtilityResult]:
        """Return results of utility calls that finished asynchronously; a step may complete some."""
        done = [(call, future) for call, future in self._pending_calls if future.done()]
        self._pending_calls = [(call, future) for call, future in self._pending_calls if not future.done()]
        answers = [self._answer(call, future.result) for call, future in done]
        return [answer for answer in answers if answer is not None]

    def handle(self, message: CoreRequest) -> CoreMessage | None:
        """Handle one message. A utility call is answered at once or by `pop_answers`; an abort returns the prompt
        tokens wasted per tenant.

        Raises:
            EngineDeadError: the core failed before.
        """
        with self._fail_core_on_error():
            if isinstance(message, AddRequest):
                for request in message.requests():
                    self.add_request(request)
            elif isinstance(message, AbortRequests):
                return self._abort(message)
            elif isinstance(message, UtilityCall):
                return self._call_utility(message)
            elif isinstance(message, StepStarted) and self._lockstep is not None:
                self._lockstep.receive(message)
            return None

    def _abort(self, message: AbortRequests) -> EngineCoreOutputs | None:
        now = self._clock()
        spent = self.scheduler.wasted_prompt_tokens(message.request_ids)
        self.scheduler.finish_requests(message.request_ids, message.reason, now)
        return EngineCoreOutputs([], None, now, spent) if spent else None

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; an invalid one fails with the next step and affects no other."""
        try:
            holds = [hold for feature in self._features for hold in feature.holds_for(message)]
            self.scheduler.add_request(request_of(message), self._clock(), holds)
        except ClientError as error:
            refusal = RequestUpdate(
                message.request_id, [], finish_reason="error", error=str(error), refused=True
            )
            self._queue_updates([refusal])
            return
        for feature in self._features:
            feature.admitted(message.request_id)

    def explain(self, request_id: str) -> Explanation | None:
        """Explain why a request waits or waited; None if it is unknown."""
        return self.scheduler.explain(request_id, self._clock())

    def shutdown(self) -> None:
        """Release all resources; may be called twice. What features still write is written first."""
        if self._failure is None:
            self.settle()
            self._publish_events()
        for feature in self._features:
            feature.close()
        self.executor.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._trace is not None:
            self._trace.close()

    def _reset_prefix_cache(self) -> bool:
        self.settle()
        return self.scheduler.reset_prefix_cache()

    def settle(self) -> None:
        """Let features end their work on the KV cache; updates of steps that this takes are queued."""
        for feature in self._features:
            feature.settle(self.run_step)

    def run_step(self) -> None:
        """Run a step; its updates are queued for the next output."""
        self._queue_updates(self._take_step())

    def check_files(self) -> None:
        """Raise StartupError if the model's files are no longer those of the start, or of the last update."""
        check_files(self._config)

    def check_new_weights(self) -> None:
        """Raise ConflictError if a feature holds something of the old weights that a request needs."""
        for feature in self._features:
            feature.check_new_weights()

    def has_weights_of(self, model_dir: str) -> bool:
        """Return whether the weights in use are those of a directory."""
        return model_dir == self._config.model_dir

    def use_weights_of(self, model_dir: str) -> None:
        """Note that the weights of a directory are in use."""
        config = self._config.with_weights(model_dir)
        self._config = replace(config, files=states_of(config))
        for feature in self._features:
            feature.use_new_weights()

    @contextmanager
    def _fail_core_on_error(self) -> Iterator[None]:
        """Mark the core as failed on any error, which may leave scheduler and worker inconsistent."""
        if self._failure is not None:
            name = type(self._failure).__name__
            raise EngineDeadError(f"the engine failed before ({name}) and cannot continue") from self._failure
        try:
            yield
        except BaseException as failure:
            self._failure = failure
            raise

    def _queue_updates(self, updates: list[RequestUpdate]) -> None:
        """Queue updates for the next step's output."""
        self._pending_updates += updates

    def _take_step(self) -> list[RequestUpdate]:
        """Step this core's requests; without any, take part in a step that another replica has started."""
        if self._lockstep is None:
            return self._loop.step()
        before = self._lockstep.started
        updates = self._loop.step()
        if self._lockstep.is_behind and self._lockstep.started == before:
            self._lockstep.begin()
            self.executor.take_part()
        return updates

    def _call_utility(self, call: UtilityCall) -> UtilityResult | None:
        if call.method not in self.utilities:
            return UtilityResult(call.call_id, error=f"the core has no utility {call.method!r}")
        return self._answer(call, partial(self.utilities[call.method], *call.args))

    def _answer(self, call: UtilityCall, work: Callable[[], Any]) -> UtilityResult | None:
        """Return the result of a call; None while pending. A failure affects only its call, unless it is vital."""
        try:
            result = work()
            if isinstance(result, Future) and not result.done():
                self._pending_calls.append((call, result))
                return None
            result = msgspec.to_builtins(result.result() if isinstance(result, Future) else result)
        except ClientError as error:
            return UtilityResult(call.call_id, error=str(error), refused=True)
        except Exception as error:
            if call.method in self._vital and not isinstance(error, StartupError):
                raise
            logger.exception("the utility %r failed", call.method)
            what = f"{type(error).__name__}; see the engine core's log for the traceback"
            return UtilityResult(call.call_id, error=f"the utility {call.method!r} failed: {what}")
        self._publish_events()  # the next step may be far off
        return UtilityResult(call.call_id, result=result)

    def _pop_cache_delta(self) -> CacheDelta | None:
        """Return the changes of the prefix cache since the last call, if a feature records them."""
        for feature in self._event_readers:
            delta = feature.pop_cache_delta()
            if delta is not None:
                return delta
        return None

    def _publish_events(self) -> None:
        """Publish KV cache events to subscribers, and let features record them."""
        if self._publisher is None and not self._event_readers:
            return
        events = self.scheduler.pop_kv_events()
        if events:
            for feature in self._event_readers:
                feature.note_kv_events(events)
        if events and self._publisher is not None:
            self._publisher.publish(events, time.time())


@contextmanager
def _shut_down_on_error(executor: Executor) -> Iterator[None]:
    """Shut the executor down if the core's construction fails, so that no processes are left."""
    try:
        yield
    except BaseException:
        executor.shutdown()
        raise
