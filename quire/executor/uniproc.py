"""The executor with one worker in the engine core's own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.executor.base import Executor
from quire.executor.lane import CallerLane, EagerLane, Lane, ThreadLane
from quire.executor.own_device import take_own_device
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.layers.shard import WHOLE, Shard
from quire.lora_request import LoRARequest
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary
from quire.worker.devices import make_device
from quire.worker.worker import Worker


class UniprocExecutor(Executor):
    """Hands every call to its worker.

    If steps are to overlap with the core's work, and the device does not go on by itself, that has a thread of its own.
    """

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE) -> None:
        super().__init__(config)
        if config.parallel.num_ranks == 1:
            take_own_device(config, 0)
        device = make_device(config.device.device)
        self._worker = Worker(config, device, shard)
        overlapping = EagerLane if device.is_asynchronous else ThreadLane
        self._lane: Lane = overlapping() if config.scheduler.async_scheduling else CallerLane()
        self._steps: deque[Callable[[], Callable[[], ModelRunnerOutput]]] = deque()

    def load(self) -> None:
        self._lane.start(self._worker.load)()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def kv_memory(self) -> KVMemory:
        return self._worker.kv_memory()

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._lane.start(partial(self._worker.initialize_kv_cache, kv_config))()

    def submit(self, plan: SchedulerOutput) -> None:
        self._steps.append(self._lane.start(partial(self._execute, plan)))

    def collect(self) -> ModelRunnerOutput:
        result = self._steps.popleft()()
        return result()

    def sleep(self, level: int) -> None:
        self._lane.start(partial(self._worker.sleep, level))()

    def wake_up(self, tag: str) -> None:
        failure = self._lane.start(partial(_startup_error, partial(self._worker.wake_up, tag)))()
        if failure is not None:
            raise failure

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        self._worker.grammars.use_vocabulary(source)

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        return self._worker.grammars.prepare(params)

    def prepare_adapter(self, request: LoRARequest) -> Future[None]:
        return self._worker.adapters.prepare(request)

    def drop_adapter(self, key: str) -> None:
        self._lane.start(partial(self._worker.adapters.drop, key))()

    def shutdown(self) -> None:
        self._lane.close()
        self._worker.shutdown()

    def _execute(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run a step, on the lane; returns what waits for the result."""
        return self._worker.submit(plan)


def _startup_error(call: Callable[[], None]) -> StartupError | None:
    """What a call raises that has done nothing then: it must not end the lane."""
    try:
        call()
    except StartupError as error:
        return error
    return None
