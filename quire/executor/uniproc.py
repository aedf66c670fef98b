"""The executor with one worker in the engine core's own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.executor.lane import CallerLane, Lane, ThreadLane
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.worker.cpu import CpuDevice
from quire.worker.worker import Worker


class UniprocExecutor(Executor):
    """Hands every call to its worker, which has a thread of its own if steps are to overlap with the core's work."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._worker = Worker(config, CpuDevice())
        self._lane: Lane = ThreadLane() if config.scheduler.async_scheduling else CallerLane()
        self._results: deque[Callable[[], ModelRunnerOutput]] = deque()

    def load(self) -> None:
        self._lane.start(self._worker.load)()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def kv_memory(self) -> KVMemory:
        return self._worker.kv_memory()

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._lane.start(partial(self._worker.initialize_kv_cache, kv_config))()

    def submit(self, plan: SchedulerOutput) -> None:
        self._results.append(self._lane.start(partial(self._worker.execute_model, plan)))

    def collect(self) -> ModelRunnerOutput:
        return self._results.popleft()()

    def shutdown(self) -> None:
        self._lane.close()
        self._worker.shutdown()
