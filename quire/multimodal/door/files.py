# SPDX-License-Identifier: Apache-2.0
"""Files with processed items, named by digest, in a private directory.

Invariant: a file lives at least as long as a lease on it. Files without leases stay as a cache, least recently used
first to go, within a limit of bytes. A lease may end in any thread, wherever its last reference goes.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from quire import private_directories
from quire.multimodal.door.layout import PlaceholderLayout, PreparedItem


@dataclass
class _MediaFile:
    item: PreparedItem
    num_bytes: int
    num_leases: int = 0


class MediaFiles:
    """Directory of files, made on first use.

    Args:
        max_bytes: limit of the files without leases together with those that have some.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[bytes, _MediaFile] = OrderedDict()
        self._directory: Path | None = None
        self._num_inputs = 0
        self._lock = threading.RLock()  # a collection inside may end a lease
        self.num_bytes = 0

    @property
    def directory(self) -> Path:
        """Private directory of the files. Raises OSError if the machine refuses it."""
        if self._directory is None:
            self._directory = private_directories.make("media-")
            weakref.finalize(self, private_directories.remove, self._directory)
        return self._directory

    def path_of(self, digest: bytes) -> Path:
        """Return the file of an item, existing or not."""
        return self.directory / f"{digest.hex()}.safetensors"

    def input_path(self) -> Path:
        """Return a new name for the bytes of an item that is to be decoded."""
        self._num_inputs += 1
        return self.directory / f"input-{self._num_inputs}"

    def find(self, digest: bytes) -> PreparedItem | None:
        """Return a processed item, as the most recently used one; None if there is no file."""
        with self._lock:
            file = self._files.get(digest)
            if file is None:
                return None
            self._files.move_to_end(digest)
            return file.item

    def add(self, digest: bytes, kind: str, layout: PlaceholderLayout, num_bytes: int) -> PreparedItem:
        """Register a file that was written, and remove others to stay within the limit."""
        item = PreparedItem(digest, kind, str(self.path_of(digest)), layout)
        with self._lock:
            self._files[digest] = _MediaFile(item, num_bytes)
            self.num_bytes += num_bytes
            self._evict(spared=digest)
        return item

    def lease(self, digest: bytes) -> Lease:
        """Keep this file, which exists, until the lease is closed or collected."""
        with self._lock:
            self._files[digest].num_leases += 1
        return Lease(self, digest)

    def release(self, digest: bytes) -> None:
        """End one lease; called by `Lease`."""
        with self._lock:
            self._files[digest].num_leases -= 1
            self._evict()

    def close(self) -> None:
        """Remove the directory; idempotent."""
        if self._directory is not None:
            private_directories.remove(self._directory)

    def _evict(self, spared: bytes | None = None) -> None:
        for digest, file in list(self._files.items()):
            if self.num_bytes <= self._max_bytes:
                return
            if file.num_leases == 0 and digest != spared and self._files.pop(digest, None) is not None:
                self.num_bytes -= file.num_bytes
                Path(file.item.path).unlink(missing_ok=True)


class Lease:
    """Claim of a request on a file, ended by `close` or with the last reference to it."""

    def __init__(self, files: MediaFiles, digest: bytes) -> None:
        self._end = weakref.finalize(self, files.release, digest)
        self._end.atexit = False

    def close(self) -> None:
        """Release the files; idempotent."""
        self._end()
