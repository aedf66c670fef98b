# SPDX-License-Identifier: Apache-2.0
"""Interface of a store of KV cache rows outside the engine.

A row is one block of the KV cache: its bytes in every cache tensor of one worker, in order. A row's name is the block's
key in the block pool, which covers its tokens, all tokens before them and its group. So the content of a name never
changes: a store may lose a row, and has no reason to replace one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from quire.errors import ConfigError, QuireError
from quire.kv_cache.rows import RowStoreStats as RowStoreStats

Row = Sequence[memoryview]
"""Parts of one row in memory, contiguous and of bytes each; together `Namespace.row_bytes` long."""

NAME_BYTES = 36


class RowStoreError(QuireError):
    """The store as a whole does not work now: disk error, peer gone. One damaged row raises nothing."""


class OtherNamespaceError(ConfigError):
    """Rows depend on other values than these; names them, which a peer may read."""


class Namespace(msgspec.Struct, frozen=True):
    """Everything but its name that the bytes of a row depend on.

    Args:
        values: setting -> value, e.g. the digest of the weights, dtype, block size, kernels.
        row_bytes: size of a row.
    """

    values: Mapping[str, str]
    row_bytes: int

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over everything here."""
        content = json.dumps({**self.values, "row_bytes": str(self.row_bytes)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def check_same(self, stored: Namespace, where: str) -> None:
        """Check that rows of another namespace can be read as rows of this one.

        Raises:
            OtherNamespaceError: a value differs; names all that do, with both values.
        """
        mine = {**self.values, "row_bytes": str(self.row_bytes)}
        theirs = {**stored.values, "row_bytes": str(stored.row_bytes)}
        differing = [
            name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)
        ]
        if differing:
            listed = "; ".join(
                f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here" for name in differing
            )
            raise OtherNamespaceError(f"the KV cache rows of {where} do not fit this engine: {listed}")


class RowStore(Protocol):
    """Rows by name.

    Methods are called from one I/O thread, and `find` also from another one if `finds_at_once`. Names of one call are
    distinct and in the order of their sequence, head first. A method that waits for a disk or a peer holds no
    interpreter lock meanwhile, and returns within a bounded time.

    Invariant: a row that `read` reports as read has exactly the bytes that were written under its name.

    Attributes:
        finds_at_once: `find` answers from memory and may be called from any thread.
        medium: short name of the tier, for usage and KV events ("DISK", "PEER").
        is_writable: False if rows can only be read, e.g. because another engine has the store open.
    """

    finds_at_once: bool
    medium: str
    is_writable: bool

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Return which rows the store has.

        Raises:
            RowStoreError: the store does not work now.
        """
        ...

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Fill rows; returns which of them were read. The others have undefined content.

        Rows that were read become the most recently used ones, the head of the sequence last, so that tails are
        evicted first. A damaged row is removed, counted, and not read.

        Raises:
            RowStoreError: the store does not work now.
        """
        ...

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Store rows, head first, evicting the least recently used ones; returns how many the store has now.

        Rows that the store has already are not written again. Without room, or if it is not writable, the rest is
        left out.

        Raises:
            RowStoreError: the store does not work now.
        """
        ...

    def touch(self, names: Sequence[bytes]) -> None:
        """Make rows of a sequence, head first, the most recently used ones; unknown names are ignored.

        Raises:
            RowStoreError: the store does not work now.
        """
        ...

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove rows whose content is wrong; unknown names are ignored.

        Raises:
            RowStoreError: the store does not work now.
        """
        ...

    def names(self) -> list[bytes]:
        """Return the names of all rows, as far as they are known: not of a peer, nor of encrypted rows."""
        ...

    def pop_removed(self) -> list[bytes]:
        """Return names of rows that were evicted or removed since the last call."""
        ...

    def stats(self) -> RowStoreStats:
        """Return a snapshot."""
        ...

    def close(self) -> None:
        """Release files, locks and connections; may be called twice."""
        ...
