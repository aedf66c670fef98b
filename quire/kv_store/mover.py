# SPDX-License-Identifier: Apache-2.0
"""Rows between a worker's host blocks and other places: one thread per place, and all I/O on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from quire.config import EngineConfig
from quire.config.kv_store import KVStoreConfig
from quire.errors import ConfigError
from quire.kv_cache.rows import OFFERS, STORE, LeaseStats, RowAction, RowResult, RowStoreInfo
from quire.kv_cache.sizing import blocks_per_request
from quire.kv_cache.spec import KVCacheConfig
from quire.kv_store.connector import Connector, open_connector
from quire.kv_store.disk.namespaces import MOST_WRITERS
from quire.kv_store.disk.shared import SharedDiskStore
from quire.kv_store.namespace import namespace_of
from quire.kv_store.peer import PeerStore
from quire.kv_store.population import Population
from quire.kv_store.row_store import (
    NAME_BYTES,
    Namespace,
    Row,
    RowStore,
    RowStoreError,
    RowStoreStats,
)
from quire.layers.shard import Shard
from quire.models.stages import Stage

logger = logging.getLogger(__name__)

Work = Callable[[RowAction, list[bytes], list[int]], RowResult]


class Movers:
    """Mover of rows to and from all places of one worker (`quire.kv_cache.rows.RowMover`).

    Args:
        store: the engine's own one, if it has one.
        connector: to other engines, if there is one.
        longest: blocks of the longest request, whose memory is populated ahead.
    """

    def __init__(
        self, row_bytes: int, store: RowStore | None, connector: Connector | None, longest: int
    ) -> None:
        self._row_bytes, self._store, self._connector = row_bytes, store, connector
        self._host: list[memoryview] = []
        self._widths: list[int] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._longest = longest
        self.population = Population([], 0)
        self.info = _info_of(row_bytes, store, connector)

    def use(self, host: Sequence[Tensor], cache: Sequence[Tensor] = ()) -> None:
        self.population.stop()
        self._host = [tensor.numpy().reshape(-1).data for tensor in host]
        self._widths = [tensor.shape[1] for tensor in host]
        assert sum(self._widths) in (0, self._row_bytes), "the host tier has rows of another size"
        if all(tensor.is_cpu for tensor in cache):  # the host tier of a GPU has its pages
            self.population = Population([*cache, *host], self._longest)

    def start(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        names = [name for name, _ in rows]
        if place == STORE and action == "find" and self._store is not None and self._store.finds_at_once:
            done: Future[RowResult] = Future()
            done.set_result(_found(self._store, names))
            return done
        if place not in self._threads:
            name = f"quire-kv-{'transfer' if place else 'store'}"
            self._threads[place] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        block_ids = [block_id for _, block_id in rows]
        return self._threads[place].submit(self._run, place, action, names, block_ids)

    def close(self) -> None:
        self.population.stop()
        for thread in self._threads.values():
            thread.shutdown()
        if self._connector is not None:
            self._connector.shutdown()
        if self._store is not None:
            self._store.close()

    def _run(self, place: str, action: RowAction, names: list[bytes], block_ids: list[int]) -> RowResult:
        """Run an action on the thread; a place that does not work is reported, as requests can do without it."""
        try:
            if place == STORE:
                return self._run_at_store(action, names, block_ids)
            if place == OFFERS:
                done = self._offer(action, names, block_ids)
                return RowResult(done, leases=self._lease_stats())
            return RowResult(self._pull(place, action, names, block_ids))
        except RowStoreError as error:
            where = f"the engine at {place}" if place else "the KV cache store"
            logger.warning("%s does not work: %s", where, error)
            return RowResult([False] * len(names), str(error))

    def _run_at_store(self, action: RowAction, names: list[bytes], block_ids: list[int]) -> RowResult:
        store = self._store
        assert store is not None, "this engine has no store"
        if action == "load":
            done = store.read(names, self._rows(block_ids))
        elif action == "save":
            num_stored = store.write(names, self._rows(block_ids))
            done = store.find(names) if num_stored < len(names) else [True] * len(names)
        elif action == "find":
            done = store.find(names)
        elif action == "list":
            return RowResult([], stats=store.stats(), removed=store.pop_removed(), names=store.names())
        else:
            (store.touch if action == "touch" else store.remove)(names)
            return RowResult([True] * len(names), stats=store.stats())  # which the core does not wait for
        return RowResult(done, stats=store.stats(), removed=store.pop_removed())

    def _lease_stats(self) -> LeaseStats:
        assert self._connector is not None, "this engine has no connector"
        return self._connector.lease_stats()

    def _offer(self, action: RowAction, names: list[bytes], block_ids: list[int]) -> list[bool]:
        """Keep rows under the lease that is the first name, or end leases and drop rows; `list` has no rows."""
        assert self._connector is not None, "this engine has no connector"
        if action == "list":
            return []
        if action == "remove":
            self._connector.drop(names)
            return [True] * len(names)
        assert action == "save", f"{action} at the place of offers"
        return [True, *self._connector.save_kv(names[0], names[1:], self._rows(block_ids[1:]))]

    def _pull(self, peer: str, action: RowAction, names: list[bytes], block_ids: list[int]) -> list[bool]:
        """Find or load rows of a peer, or renew or end the lease that is the only name."""
        connector = self._connector
        assert connector is not None, "this engine has no connector"
        if action == "find":
            return connector.get_new_matched(peer, names)
        if action == "load":
            return connector.start_load_kv(peer, names, self._rows(block_ids))
        assert action in ("touch", "remove"), f"{action} at a peer"
        (connector.renew_lease if action == "touch" else connector.finish_recv)(peer, names[0])
        return [True]

    def _rows(self, block_ids: Sequence[int]) -> list[Row]:
        return [self._row(block_id) for block_id in block_ids]

    def _row(self, block_id: int) -> Row:
        parts = zip(self._host, self._widths, strict=True)
        return [part[block_id * width : (block_id + 1) * width] for part, width in parts]


def _found(store: RowStore, names: list[bytes]) -> RowResult:
    """Look rows up on the core's thread, which a directory that has gone must not end."""
    try:
        return RowResult(store.find(names))
    except RowStoreError as error:
        return RowResult([False] * len(names), str(error))


def _info_of(row_bytes: int, store: RowStore | None, connector: Connector | None) -> RowStoreInfo:
    host, port = ("", 0) if connector is None else (connector.host, connector.port)
    if store is None:
        return RowStoreInfo("", row_bytes, False, 0, host, port)
    stats: RowStoreStats = store.stats()
    return RowStoreInfo(store.medium, row_bytes, store.is_writable, stats.num_rows, host, port)


def open_row_mover(config: EngineConfig, kv_config: KVCacheConfig, shard: Shard, stage: Stage) -> Movers:
    """Open the configured store, and connect to other engines, for the rows of one worker.

    Raises:
        ConfigError: either cannot be opened.
    """
    asked = config.kv_store
    assert asked.moves_rows, "only with --kv-store or --kv-transfer-config"
    namespace = namespace_of(config, kv_config, shard, stage)
    if namespace.row_bytes == 0:
        option = "--kv-store" if asked.kv_store is not None else "--kv-transfer-config"
        raise ConfigError(f"{option}: this model has no KV cache; leave the option out")
    connector = _open_connector(config, namespace, shard, stage)
    try:
        store = None if asked.kv_store is None else _open_store(asked, asked.kv_store, namespace)
    except BaseException as error:
        if connector is not None:
            connector.shutdown()
        if isinstance(error, RowStoreError):
            raise ConfigError(f"--kv-store: {error}") from error
        raise
    chunk = config.scheduler.max_num_batched_tokens
    longest = blocks_per_request(kv_config.groups, config.model.max_model_len, chunk)
    return Movers(namespace.row_bytes, store, connector, longest)


def _open_connector(
    config: EngineConfig, namespace: Namespace, shard: Shard, stage: Stage
) -> Connector | None:
    transfer = config.kv_store.transfer
    if transfer is None:
        return None
    rank = stage.index * shard.of + shard.rank
    first = transfer.port_of(config.parallel.first_replica, config.parallel.num_ranks)
    return open_connector(transfer, namespace, first + rank, rank)


def _open_store(asked: KVStoreConfig, place: str, namespace: Namespace) -> RowStore:
    """Open a directory, or connect to a server at once, so that a wrong address or key fails the start."""
    if asked.is_peer:
        peer = PeerStore(place, namespace, asked.key())
        peer.find([bytes(NAME_BYTES)])
        logger.info("KV store: connected to %s", place)
        return peer
    store = SharedDiskStore(Path(place), namespace, asked.max_bytes, asked.key())
    others = f", with those of {store.num_others} other engines" if store.num_others else ""
    reason = f"its file system is read-only, or {MOST_WRITERS} other engines write there"
    access = "" if store.is_writable else f"; nothing is saved, as {reason}"
    logger.info("KV store: %d rows in %s%s%s", store.stats().num_rows, place, others, access)
    return store
