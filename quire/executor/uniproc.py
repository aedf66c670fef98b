"""The executor with one worker in the engine core's own process."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, SwapCosts
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.worker.cpu import CpuDevice
from quire.worker.worker import Worker


class UniprocExecutor(Executor):
    """Hands every call to its worker."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._worker = Worker(config, CpuDevice())

    def load(self) -> None:
        self._worker.load()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def available_kv_bytes(self) -> int:
        return self._worker.available_kv_bytes()

    def swap_costs(self) -> SwapCosts:
        return self._worker.swap_costs()

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._worker.initialize_kv_cache(kv_config)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute_model(plan)

    def shutdown(self) -> None:
        self._worker.shutdown()
