"""`EngineCore`: one scheduler, one executor, and the loop that joins them.

Invariant: only this module owns both columns of the system. It knows token ids and blocks, never text, HTTP or
processes; whoever holds it calls `handle` for each message and `step` while there is work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.kv_events import create_publisher
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
    request_of,
)
from quire.engine.recorder import recorded
from quire.engine.step_loop import make_loop
from quire.engine.trace import create_trace
from quire.errors import ClientError
from quire.executor.base import Executor
from quire.executor.registry import resolve_executor
from quire.kv_cache.sizing import settle_max_model_len, size_kv_cache
from quire.scheduler.explain import Explanation
from quire.scheduler.output import RequestUpdate
from quire.scheduler.registry import resolve_scheduler


class EngineCore:
    """Loads the model, sizes the cache, then turns requests into updates step by step.

    Raises:
        StartupError: the model cannot be loaded, or memory does not suffice for one request.
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        scheduler_class = resolve_scheduler(config.scheduler.scheduler_cls)
        self.executor: Executor = resolve_executor(config.parallel.distributed_executor_backend)(config)
        self.executor.load()
        kv_config = size_kv_cache(config, self.executor.kv_cache_specs(), self.executor.kv_memory())
        config = settle_max_model_len(config, kv_config)
        self.executor.initialize_kv_cache(kv_config)
        self.scheduler = scheduler_class(config, kv_config)
        self._publisher = create_publisher(config)
        self._trace = create_trace(config, kv_config)
        if self._trace is not None:
            self.scheduler = recorded(self.scheduler, self._trace)
        self._loop = make_loop(config.scheduler, self.scheduler, self.executor)
        self.utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "check_integrity": self.scheduler.check_integrity,
            "stats": self.scheduler.stats,
            "explain": self.explain,
        }
        self._refused: list[RequestUpdate] = []
        self.ready = CoreReady(
            num_blocks=kv_config.num_blocks,
            block_size=config.cache.block_size,
            kv_cache_bytes=kv_config.bytes,
            max_model_len=config.model.max_model_len,
            load_s=time.monotonic() - started,
        )

    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self._refused) or self.scheduler.has_work()

    def step(self) -> EngineCoreOutputs:
        """One turn of the loop; returns every request's news."""
        updates = self._refused + self._loop.step()
        self._refused = []
        self._publish_events()
        return EngineCoreOutputs(updates, self.scheduler.stats(), time.monotonic())

    def handle(self, message: CoreRequest) -> CoreMessage | None:
        """Act on one message; only utility calls have an answer."""
        if isinstance(message, AddRequest):
            for request in message.requests():
                self.add_request(request)
        elif isinstance(message, AbortRequests):
            self.scheduler.finish_requests(message.request_ids, message.reason, time.monotonic())
        elif isinstance(message, UtilityCall):
            return self._call_utility(message)
        return None

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; one that can never run ends with an error at the next step, and costs only itself."""
        try:
            self.scheduler.add_request(request_of(message), time.monotonic())
        except ClientError as error:
            self._refused.append(
                RequestUpdate(message.request_id, [], finish_reason="error", error=str(error))
            )

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits or waited; None if the core does not know it."""
        return self.scheduler.explain(request_id, time.monotonic())

    def shutdown(self) -> None:
        self.executor.shutdown()
        if self._publisher is not None:
            self._publisher.close()
        if self._trace is not None:
            self._trace.close()

    def _call_utility(self, call: UtilityCall) -> UtilityResult:
        if call.method not in self.utilities:
            return UtilityResult(call.call_id, error=f"the core has no utility {call.method!r}")
        result = self.utilities[call.method](*call.args)
        self._publish_events()  # there may be no step for long
        return UtilityResult(call.call_id, result=msgspec.to_builtins(result))

    def _publish_events(self) -> None:
        """Tell subscribers what happened to the prefix cache."""
        if self._publisher is None:
            return
        events = self.scheduler.take_kv_events()
        if events:
            self._publisher.publish(events, time.time())
