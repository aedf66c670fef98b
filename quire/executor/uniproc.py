# SPDX-License-Identifier: Apache-2.0
"""Executor with one worker in the engine core's own process.

`CallQueue`: executor calls in the caller's thread, or in order on a thread of their own. Invariant: calls run one at a
time in the order in which they were started, and none runs after one has failed.

`select_own_device`: a rank's device has its number among all ranks of all replicas on the host, and is the only one
visible to its process. Invariant: it is set before any device is used.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from quire.adapters import AdapterRequest
from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.executor.base import Executor
from quire.executor.feature_calls import Result
from quire.kv_cache.rows import STORE, RowAction, RowResult, RowStoreInfo
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.layers.shard import WHOLE, Shard
from quire.media import EncodeProgress, MediaItem
from quire.platforms import GPUS
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary
from quire.worker.devices import make_device
from quire.worker.worker import Worker


class CallQueue(ABC):
    """Queue that runs calls in order, until one fails."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    @abstractmethod
    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Start a call; returns a function that waits for its result, or raises the first error."""

    def close(self) -> None:
        """Wait for the started calls; may be called twice."""
        return None

    def _run(self, call: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except BaseException as failure:
            self._failure = failure
            raise


class CallerQueue(CallQueue):
    """Queue that runs a call in the caller's thread when its result is requested."""

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        return partial(self._run, call)


class EagerQueue(CallQueue):
    """Queue that runs a call at once in the caller's thread, for calls that only enqueue device work."""

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        future: Future[Result] = Future()
        try:
            future.set_result(self._run(call))
        except Exception as failure:
            future.set_exception(failure)
        return future.result


class ThreadQueue(CallQueue):
    """Queue that runs calls on a thread while the caller continues.

    All computation must use the same thread: torch keeps its thread pool, and its size, per thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-worker")

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        return self._thread.submit(self._run, call).result

    def close(self) -> None:
        self._thread.shutdown()


def select_own_device(
    config: EngineConfig, rank: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Restrict this process, a rank of its replica, to its own device; no effect on CPUs and for a single rank.

    Raises:
        ConfigError: there are fewer devices than ranks (all ranks raise this alike), or a device is in use already.
    """
    device, parallel, share = config.device.device, config.parallel, config.share
    num_here = parallel.num_ranks // parallel.nnodes
    num_replicas, index = (1, 0) if share is None else (share.num_replicas, share.index)
    num = num_here * num_replicas
    if device == "cpu" or num == 1:
        return
    import torch

    module = torch.get_device_module(device)
    count: int = module.device_count()
    if num > count:
        raise ConfigError(
            f"tensor x pipeline x data parallel size is {num} on this host, but it has {count} {device} devices: "
            f"--tensor-parallel-size x --pipeline-parallel-size x --data-parallel-size may be at most {max(count, 1)}"
        )
    if module.is_initialized():
        raise ConfigError(
            f"rank {rank} cannot select its own {device} device because the program has already used one: "
            "create the engine first"
        )
    names = next(platform.visibility for platform in GPUS if platform.name == device)
    name = next((name for name in names if environ.get(name)), names[0])
    shown = environ.get(name) or ",".join(map(str, range(count)))
    environ[name] = shown.split(",")[index * num_here + rank % num_here].strip()


class UniprocExecutor(Executor):
    """Executor that passes every call to its worker.

    If steps are to overlap with the core's work on a synchronous device, the worker runs on a thread of its own.
    """

    def __init__(self, config: EngineConfig, shard: Shard = WHOLE) -> None:
        super().__init__(config)
        if config.parallel.num_ranks == 1:
            select_own_device(config, 0)
        device = make_device(config.device.device)
        self._worker = Worker(config, device, shard)
        overlapping = EagerQueue if device.is_asynchronous else ThreadQueue
        self._queue: CallQueue = overlapping() if config.scheduler.async_scheduling else CallerQueue()
        self._steps: deque[Callable[[], Callable[[], ModelRunnerOutput]]] = deque()

    def load(self) -> None:
        self._worker.note_loading = self.note_loading
        self._queue.start(self._worker.load)()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def kv_memory(self) -> KVMemory:
        return self._worker.kv_memory()

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._queue.start(partial(self._worker.initialize_kv_cache, kv_config))()

    def submit(self, plan: SchedulerOutput) -> None:
        self._steps.append(self._queue.start(partial(self._execute, plan)))

    def collect(self) -> ModelRunnerOutput:
        result = self._steps.popleft()()
        return result()

    def sleep(self, level: int) -> None:
        self._queue.start(partial(self._worker.sleep, level))()

    def wake_up(self, tag: str) -> None:
        failure = self._queue.start(partial(_startup_error, partial(self._worker.wake_up, tag)))()
        if failure is not None:
            raise failure

    def prepare_weights(self, model_dir: str) -> None:
        self._queue.start(partial(_outcome, partial(self._worker.prepare_weights, model_dir)))().result()

    def commit_weights(self, *, keeps_cache: bool = False) -> None:
        self._queue.start(partial(self._worker.commit_weights, keeps_cache=keeps_cache))()

    def drop_weights(self) -> None:
        self._queue.start(self._worker.drop_weights)()

    def call_workers(self, name: str, args: Sequence[Any]) -> list[Any]:
        return [self._queue.start(partial(_outcome, partial(self._worker.call, name, args)))().result()]

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        self._worker.calls["use_vocabulary"](source)

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        prepared: Future[None] = self._worker.calls["prepare_grammar"](params)
        return prepared

    def prepare_adapter(self, request: AdapterRequest) -> Future[None]:
        prepared: Future[None] = self._worker.calls["prepare_adapter"](request)
        return prepared

    def drop_adapter(self, key: str) -> None:
        self._queue.start(partial(self._worker.calls["drop_adapter"], key))()

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        return self._queue.start(partial(self._worker.encode_media, items, budget_s))()

    def drop_media(self, digests: Sequence[bytes]) -> None:
        self._queue.start(partial(self._worker.drop_media, digests))()

    def open_row_store(self) -> RowStoreInfo:
        return self._worker.open_row_store()

    def move_rows(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        return self._worker.rows.start(action, rows, place)

    def run_on_worker(self, function: Callable[[Worker], Result]) -> Result:
        return self._queue.start(partial(_outcome, partial(function, self._worker)))().result()

    def shutdown(self) -> None:
        self._queue.close()
        self._worker.shutdown()

    def _execute(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run a step on the lane; returns a function that waits for the result."""
        return self._worker.submit(plan)


def _outcome(call: Callable[[], Result]) -> Future[Result]:
    """Return the result or the error of a call whose failure leaves the worker as it was, and does not end the lane."""
    done: Future[Result] = Future()
    try:
        done.set_result(call())
    except Exception as error:  # raised to the caller
        done.set_exception(error)
    return done


def _startup_error(call: Callable[[], None]) -> StartupError | None:
    """Return the StartupError of a call that had no effect, so that it does not end the lane."""
    try:
        call()
    except StartupError as error:
        return error
    return None
