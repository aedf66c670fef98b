# SPDX-License-Identifier: Apache-2.0
"""Opening the rows of a namespace on a local disk."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigError
from quire.kv_store.disk.encryption import OVERHEAD_BYTES, Sealer
from quire.kv_store.disk.namespaces import Root
from quire.kv_store.disk.reader import DiskReader
from quire.kv_store.disk.segment import SegmentLayout
from quire.kv_store.disk.store import DiskStore, disk_errors
from quire.kv_store.disk.writer import DiskWriter
from quire.kv_store.row_store import Namespace


def open_disk_store(
    directory: Path, namespace: Namespace, max_bytes: int, key: bytes | None = None, *, beside: bool = False
) -> DiskStore:
    """Open the rows of a namespace in its first directory, as their writer if no other process is.

    Args:
        directory: directory of all namespaces; made if it is missing.
        namespace: what rows depend on beside their names.
        max_bytes: limit for all files below `directory`; `room.py` says whose rows give way to keep it.
        key: 32 bytes to encrypt rows with; None: rows are stored as they are.
        beside: write to a directory beside the first one if that has a writer. Engines do so (`shared.py`).

    Raises:
        ConfigError: the directory cannot be used, the limit has no room for a row, or the key does not fit the rows.
        RowStoreError: the disk does not work.
    """
    sealer = None if key is None else Sealer(key, namespace.digest)
    layout = _layout_of(namespace, sealer)
    if layout.num_slots_in(max_bytes) == 0:
        raise ConfigError(
            f"{max_bytes} bytes for the KV cache in {directory} have no room for one row; "
            f"give at least {layout.segment_bytes(1)} bytes"
        )
    root = Root(directory.absolute(), create=True)
    try:
        with disk_errors(root.path), root.locked():
            fingerprint = sealer.fingerprint if sealer else None
            opened = (root.open_own if beside else root.open_namespace)(namespace, fingerprint)
            kind = DiskWriter if opened.is_writer else DiskReader
            return kind(root, opened, layout, max_bytes, sealer).open()
    except BaseException:
        root.close()
        raise


def open_rows_of(directory: Path, namespace: Namespace, name: str, key: bytes | None) -> DiskStore:
    """Open the rows in a directory of another writer, to read them only.

    Raises:
        ConfigError: it has gone, cannot be used, or has rows of another key.
        RowStoreError: the disk does not work.
    """
    sealer = None if key is None else Sealer(key, namespace.digest)
    root = Root(directory.absolute(), create=False)
    try:
        with disk_errors(root.path):
            opened = root.open_namespace(namespace, sealer.fingerprint if sealer else None, name, write=False)
            return DiskReader(root, opened, _layout_of(namespace, sealer), 0, sealer).open()
    except BaseException:
        root.close()
        raise


def _layout_of(namespace: Namespace, sealer: Sealer | None) -> SegmentLayout:
    return SegmentLayout(namespace.digest, namespace.row_bytes + (OVERHEAD_BYTES if sealer else 0))
