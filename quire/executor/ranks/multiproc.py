# SPDX-License-Identifier: Apache-2.0
"""Executor with a process per rank, on this host and on joining hosts; and the headless host's side.

Invariant of a headless host: this process only starts and watches its ranks, which connect to the engine themselves.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from quire.adapters import AdapterRequest
from quire.config import EngineConfig
from quire.errors import EngineError, StartupError, ValidationError
from quire.executor.base import Executor
from quire.executor.rank_placement import memory_per_rank, rank_config, rank_processors
from quire.executor.ranks.gate import RankHello, join
from quire.executor.ranks.handles import CallFuture, Ranks
from quire.executor.ranks.rank_processes import HostStarter, RankProcesses, RankStarter
from quire.kv_cache.rows import STORE, RowAction, RowResult, RowStoreInfo, all_done
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory, decode_specs, encode_kv_config
from quire.media import EncodeProgress, MediaItem, all_encoded
from quire.processes import exit_reason
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

POLL_S = 0.2
STOPPED_POLLS = 25  # Consecutive polls after which a stopped rank is ended; waiting peers cannot detect it.


def run_headless(config: EngineConfig) -> int:
    """Run this host's ranks until the engine, one of them or a signal ends them; returns the exit code.

    Raises:
        StartupError: the engine is unreachable or refuses these ranks.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parallel = config.parallel
    ranks = parallel.ranks_of(parallel.node_rank)
    place = parallel.master_addr, parallel.master_port
    hellos = [RankHello.create(parallel, rank) for rank in ranks]
    try:
        ended = run_ranks(rank_config(config, len(ranks)), hellos, place)
    except KeyboardInterrupt:
        return 0
    for rank, how in ended.items():
        logger.info("rank %d has ended: %s", rank, how)
    return int(any(how != exit_reason(0) for how in ended.values()))


def run_ranks(config: EngineConfig, hellos: Sequence[RankHello], place: tuple[str, int]) -> dict[int, str]:
    """Run ranks of this host for an engine; once one has ended, stop all and return their exit reasons.

    Raises:
        StartupError: the engine is unreachable or refuses these ranks.
    """
    places = rank_processors(config, [hello.rank for hello in hellos])
    processes, stopped = RankProcesses(config, places=places), 0
    try:
        for hello in hellos:
            way = join(place, hello)
            processes.hand_over(hello.rank, way.getsockname()[0], way)
        logger.info("joined %s with ranks %s", place[0], ", ".join(str(hello.rank) for hello in hellos))
        while not (ended := processes.ended()):
            time.sleep(POLL_S)
            stopped = stopped + 1 if processes.stopped() else 0
            if stopped >= STOPPED_POLLS:
                return processes.stopped()
    finally:
        processes.close()
    return {rank: exit_reason(code) for rank, code in ended.items()}


class RowsFuture(Future[RowResult]):
    """Result of a row action on all ranks."""

    def __init__(self, answers: CallFuture) -> None:
        super().__init__()
        self._answers = answers

    def done(self) -> bool:
        return self._answers.done()

    def result(self, timeout: float | None = None) -> RowResult:
        return all_done([msgspec.convert(plain, RowResult) for plain in self._answers.result(timeout)])


class MultiprocExecutor(Executor):
    """Executor that broadcasts calls to all ranks, and takes results from the first rank of the last stage."""

    starter_type: type[RankStarter] = HostStarter

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._size = config.parallel.num_ranks
        self._stages: tuple[tuple[str, ...], ...] = ()  # Cached layers of each stage, once known.
        self._starter = self.starter_type(config, self._size)
        self._ranks = Ranks(self._starter)
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._background: ThreadPoolExecutor | None = None
        self._level = 1

    def load(self) -> None:
        place = self._all("open_store")[0] if self._starter.meets_by_network() else None
        self._all("load", place)
        self._starter.release_directory()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        wanted, shares = self._all("kv_cache_specs"), self.config.parallel.tensor_parallel_size
        stages = [wanted[first : first + shares] for first in range(0, self._size, shares)]
        if any(other != first for first, *others in stages for other in others):
            raise EngineError("ranks have different KV cache specs")
        self._stages = tuple(tuple(first) for first, *_ in stages)
        return decode_specs({name: spec for first, *_ in stages for name, spec in first.items()})

    def kv_memory(self) -> KVMemory:
        """Return the memory per rank: all ranks of a host see the same free memory and get equal parts."""
        found = [msgspec.convert(plain, KVMemory) for plain in self._all("kv_memory")]
        return replace(memory_per_rank(found, self._starter.num_sharing_memory()), stages=self._stages)

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._all("initialize_kv_cache", encode_kv_config(kv_config))

    def submit(self, plan: SchedulerOutput) -> None:
        self._ranks.step(plan)

    def collect(self) -> ModelRunnerOutput:
        return self._ranks.output()

    def take_part(self) -> None:
        self._all("take_part")

    def sleep(self, level: int) -> None:
        self._all("sleep", level)
        self._level = level

    def wake_up(self, tag: str) -> None:
        try:
            self._all("wake_up", tag)
        except StartupError:
            self._all("sleep", self._level if tag == "weights" else 1)  # ranks that have woken
            raise

    def prepare_weights(self, model_dir: str) -> None:
        if self._starter.meets_by_network():
            raise ValidationError("weights can be replaced only if all ranks are on the host of the engine")
        try:
            self._all("prepare_weights", model_dir)
        except StartupError:
            self.drop_weights()
            raise

    def commit_weights(self, *, keeps_cache: bool = False) -> None:
        self._all("commit_weights", keeps_cache)

    def drop_weights(self) -> None:
        self._all("drop_weights")

    def call_workers(self, name: str, args: Sequence[Any]) -> list[Any]:
        return self._all("call_worker", name, list(args))

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        self._vocabulary = source

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """Compile on the ranks; the vocabulary is sent with the first grammar, in the background since reading it is
        slow.
        """
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "quire-vocabulary")
        prepared = CallFuture(self._ranks)
        self._background.submit(self._prepare_grammar, params, prepared)
        return prepared

    def prepare_adapter(self, request: AdapterRequest) -> Future[None]:
        return self._ranks.call("prepare_adapter", msgspec.to_builtins(request))

    def drop_adapter(self, key: str) -> None:
        self._all("drop_adapter", key)

    def encode_media(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        found = self._all("encode_media", [msgspec.to_builtins(item) for item in items], budget_s)
        return all_encoded([msgspec.convert(plain, EncodeProgress) for plain in found])

    def drop_media(self, digests: Sequence[bytes]) -> None:
        self._all("drop_media", list(digests))

    def open_row_store(self) -> RowStoreInfo:
        infos = [msgspec.convert(plain, RowStoreInfo) for plain in self._all("open_row_store")]
        return msgspec.structs.replace(
            infos[0],
            row_bytes=sum(info.row_bytes for info in infos),
            is_writable=all(info.is_writable for info in infos),
        )

    def move_rows(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        return RowsFuture(self._ranks.call("move_rows", action, list(rows), place))

    def shutdown(self) -> None:
        if self._background is not None:
            self._background.shutdown()
        self._ranks.close()

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Return each rank's result."""
        answers: list[Any] = self._ranks.call(method, *args).result()
        return answers

    def _prepare_grammar(self, params: StructuredOutputsParams, prepared: CallFuture) -> None:
        try:
            if self._vocabulary is not None:
                self._ranks.call("use_vocabulary", msgspec.to_builtins(self._vocabulary()))
                self._vocabulary = None
        except Exception as error:  # raised to the waiting caller
            prepared.set_exception(error)
        else:
            self._ranks.call("prepare_grammar", msgspec.to_builtins(params), answers=prepared)
