"""Rows between a worker's host blocks and a store: one thread per worker, and all I/O on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from quire.config import EngineConfig
from quire.config.kv_store import KVStoreConfig
from quire.errors import ConfigError
from quire.kv_cache.rows import RowAction, RowResult, RowStoreInfo
from quire.kv_cache.spec import KVCacheConfig
from quire.kv_store.disk.store import open_disk_store
from quire.kv_store.namespace import namespace_of
from quire.kv_store.peer import PeerStore
from quire.kv_store.row_store import NAME_BYTES, Namespace, Row, RowStore, RowStoreError
from quire.layers.shard import Shard
from quire.models.stages import Stage

logger = logging.getLogger(__name__)


class StoreMover:
    """Mover of the rows of one store (`quire.kv_cache.rows.RowMover`)."""

    def __init__(self, store: RowStore, row_bytes: int) -> None:
        self._store = store
        self._row_bytes = row_bytes
        self._host: list[memoryview] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-kv-store")
        self.info = RowStoreInfo(store.medium, row_bytes, store.is_writable, store.stats().num_rows)

    def use(self, host: Sequence[Tensor]) -> None:
        self._host = [tensor.numpy().reshape(-1).data for tensor in host]
        self._widths = [tensor.shape[1] for tensor in host]
        assert sum(self._widths) in (0, self._row_bytes), "the host tier has rows of another size"

    def start(self, action: RowAction, rows: Sequence[tuple[bytes, int]]) -> Future[RowResult]:
        names = [name for name, _ in rows]
        if action == "find" and self._store.finds_at_once:
            done: Future[RowResult] = Future()
            done.set_result(RowResult(self._store.find(names)))
            return done
        return self._thread.submit(self._run, action, names, [block_id for _, block_id in rows])

    def close(self) -> None:
        self._thread.shutdown()
        self._store.close()

    def _run(self, action: RowAction, names: list[bytes], block_ids: list[int]) -> RowResult:
        """Run an action on the thread; a store that does not work is reported, as requests can do without it."""
        try:
            return RowResult(self._done(action, names, block_ids), stats=self._store.stats())
        except RowStoreError as error:
            logger.warning("the KV cache store does not work: %s", error)
            return RowResult([False] * len(names), str(error))

    def _done(self, action: RowAction, names: list[bytes], block_ids: list[int]) -> list[bool]:
        if action == "load":
            return self._store.read(names, [self._row(block_id) for block_id in block_ids])
        if action == "save":
            num_stored = self._store.write(names, [self._row(block_id) for block_id in block_ids])
            return self._store.find(names) if num_stored < len(names) else [True] * len(names)
        if action == "find":
            return self._store.find(names)
        (self._store.touch if action == "touch" else self._store.remove)(names)
        return [True] * len(names)

    def _row(self, block_id: int) -> Row:
        parts = zip(self._host, self._widths, strict=True)
        return [part[block_id * width : (block_id + 1) * width] for part, width in parts]


def open_row_mover(config: EngineConfig, kv_config: KVCacheConfig, shard: Shard, stage: Stage) -> StoreMover:
    """Open the configured store for the rows of one worker.

    Raises:
        ConfigError: the store cannot be opened.
    """
    asked = config.kv_store
    assert asked.kv_store is not None, "only with --kv-store"
    namespace = namespace_of(config, kv_config, shard, stage)
    if namespace.row_bytes == 0:
        raise ConfigError("--kv-store: this model has no KV cache; leave the option out")
    try:
        return StoreMover(_open_store(asked, asked.kv_store, namespace), namespace.row_bytes)
    except RowStoreError as error:
        raise ConfigError(f"--kv-store: {error}") from error


def _open_store(asked: KVStoreConfig, place: str, namespace: Namespace) -> RowStore:
    """Open a directory, or connect to a server at once, so that a wrong address or key is told at the start."""
    if asked.is_peer:
        peer = PeerStore(place, namespace, asked.key())
        peer.find([bytes(NAME_BYTES)])
        logger.info("KV store: connected to %s", place)
        return peer
    store = open_disk_store(Path(place), namespace, asked.max_bytes, asked.key())
    access = "" if store.is_writable else ", read only, as another process writes them"
    logger.info("KV store: %d rows in %s%s", store.stats().num_rows, place, access)
    return store
