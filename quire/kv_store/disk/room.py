# SPDX-License-Identifier: Apache-2.0
"""Room in a full directory: whose rows give way.

Folders without a writer give way first, those used longest ago before others. Then a writer that has less than its
share, which is the limit divided by the number of writers, takes from the writer that has most, as long as that has
more than its share. In both cases the segments used longest ago go first. A writer that has its share evicts its own
rows. So a writer may use what others leave free, and gets its share when it wants it.

Invariants: all folders together keep the limit. A writer takes only up to its share and only from those above theirs,
so for a given number of writers rows are taken a bounded number of times. The caller holds the lock of the root.
"""

from __future__ import annotations

import logging

from quire.kv_store.disk.files import discard
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.segment import DamagedSegmentError, SegmentFile

logger = logging.getLogger(__name__)
LOCK_S = 1.0  # Another writer writes a batch of rows meanwhile.


def keep_limit(root: Root, own: OpenNamespace, max_bytes: int) -> None:
    """Delete rows of folders without a writer, and then of the caller's own one, until all fit.

    Raises:
        OSError: the disk does not work.
    """
    folders = _Folders(root, own.name)
    folders.free_unused(max_bytes)
    discard_oldest(own, folders.num_bytes - max_bytes)


def make_room(root: Root, own: str, wanted: int, least: int, max_bytes: int) -> int:
    """Have others give way for a new segment; returns the bytes that are free then, which may be fewer or more.

    Args:
        own: folder of the caller, its writer.
        wanted: bytes of the segment.
        least: bytes of the smallest segment for which it is worth taking from another writer.
        max_bytes: limit of all folders.

    Raises:
        OSError: the disk does not work.
    """
    folders = _Folders(root, own)
    folders.free_unused(max_bytes - wanted)
    room = max(0, max_bytes - folders.num_bytes)
    if room < wanted:
        share = max_bytes // folders.num_writers()
        of_share = min(wanted, share - folders.own_bytes)
        if of_share >= least and of_share > room:
            folders.take(max_bytes - of_share, share)
            # The rest is for whom it was taken from: more than the share would be taken back.
            return min(of_share, max(0, max_bytes - folders.num_bytes))
    return room


def discard_oldest(folder: OpenNamespace, num_bytes: int) -> int:
    """Delete the segments of a folder that were used longest ago until so many bytes are free; returns how many are.

    Raises:
        OSError: the disk does not work.
    """
    freed = 0
    files = [file for _, file in folder.segment_files()] if num_bytes > 0 else []
    for file in sorted(files, key=lambda file: _last_use(folder, file)):
        if freed >= num_bytes:
            break
        freed += discard(folder.fd, file)
    return freed


def _last_use(folder: OpenNamespace, file: str) -> int:
    """Return the largest sequence number of a segment; 0 for a damaged one."""
    try:
        segment = SegmentFile.open(folder.fd, file, None, folder.digest, write=False)
    except (DamagedSegmentError, OSError) as error:
        logger.info("the KV cache rows in %s cannot be read: %s", folder.path / file, error)
        return 0
    try:
        return segment.last_use()
    finally:
        segment.close()


class _Folders:
    """Bytes of all folders of rows, as they give way to the writer of `own`."""

    def __init__(self, root: Root, own: str) -> None:
        self._root, self._own = root, own
        self._sizes = {name: root.num_bytes(name) for name in root.digests()}

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def own_bytes(self) -> int:
        return self._sizes.get(self._own, 0)

    @property
    def _others(self) -> list[str]:
        return [name for name in self._sizes if name != self._own]

    def num_writers(self) -> int:
        """Return the number of folders with a writer, the own one among them."""
        return 1 + sum(map(self._has_writer, self._others))

    def free_unused(self, max_bytes: int) -> None:
        """Delete rows that no process writes to until all fit."""
        for name in self._root.oldest_first(self._others):
            excess = self.num_bytes - max_bytes
            if excess <= 0:
                return
            if excess >= self._sizes[name]:
                if self._root.delete(name):
                    del self._sizes[name]
                continue
            with self._root.opened(name) as folder:
                if folder is not None and folder.is_writer:
                    self._sizes[name] -= discard_oldest(folder, excess)

    def take(self, max_bytes: int, share: int) -> None:
        """Take segments of writers that have more than their share, of the one with most first, until all fit."""
        others = self._others
        while others and self.num_bytes > max_bytes:
            name = max(others, key=self._sizes.__getitem__)
            above = self._sizes[name] - share
            if above <= 0:
                return
            taken = self._take_from(name, min(above, self.num_bytes - max_bytes))
            self._sizes[name] -= taken
            if taken == 0:
                others.remove(name)

    def _take_from(self, name: str, num_bytes: int) -> int:
        """Take segments of one writer, unless it is writing all the time; returns their bytes."""
        with self._root.opened(name) as folder:
            if folder is None or not folder.lock_files_within(LOCK_S):
                return 0
            try:
                taken = discard_oldest(folder, num_bytes)
            finally:
                folder.unlock_files()
        logger.info(
            "took %d bytes of KV cache rows from %s, which has more than its share",
            taken,
            self._root.path / name,
        )
        return taken

    def _has_writer(self, name: str) -> bool:
        with self._root.opened(name) as folder:
            return folder is not None and not folder.is_writer
