# SPDX-License-Identifier: Apache-2.0
"""The user's directory of namespaces: who uses which, what they take up, and which have to go.

    DIR/<digest of the namespace>/namespace.json, lock, 00000001.rows, ...
    DIR/<digest of the namespace>.1/...  # of a second engine that writes at the same time, and so on

Invariants: a directory of rows is made, locked or deleted only under the lock of DIR itself. The process that holds the
lock of such a directory is its writer, until it closes the store or ends. Rows are written, and segments of a running
writer taken away (`room.py`), only under the lock of the directory's files.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.kv_store.disk.files import (
    NO_ROOM,
    discard,
    lock_within,
    locked,
    open_directory,
    open_file,
    open_root,
    transfer_bytes,
    try_lock,
    unlock,
)
from quire.kv_store.disk.segment import segment_name, segment_number
from quire.kv_store.row_store import Namespace

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{32}(\.[1-9][0-9]?)?")
_MANIFEST = "namespace.json"
_LOCK = "lock"
MOST_WRITERS = 16
"""Engines that save rows of one namespace at a time; further ones only read."""
CLOCK_ERROR_S = 3600.0
"""Time by which files of a right clock may be ahead of this one's."""
_MAX_MANIFEST_BYTES = 1 << 20


class Manifest(msgspec.Struct, frozen=True):
    """Content of namespace.json; `key` is the fingerprint of the key of its rows, None without encryption."""

    values: dict[str, str]
    row_bytes: int
    key: str | None = None


class OpenNamespace:
    """Descriptor of one namespace's directory, and of its lock if this process is the writer.

    Attributes:
        fd: the directory.
        path: the directory, for messages.
        name: its name, the digest and the number of the writer.
        digest: that of the namespace.
        is_writer: this process holds the lock.
        is_read_only: the file system is, so that there is no writer.
    """

    def __init__(self, root: int, directory: Path, name: str, *, create: bool, write: bool = True) -> None:
        self.path = directory / name
        self.name, self.digest = name, name.partition(".")[0]
        self.fd = open_directory(root, name, self.path, create=create)
        self._lock = -1
        self.is_writer = self.is_read_only = False
        try:
            self._lock = open_file(self.fd, _LOCK, os.O_RDWR | os.O_CREAT)
            self.is_writer = write and try_lock(self._lock)
        except OSError as error:
            self.is_read_only = error.errno == errno.EROFS
            if self.is_read_only:
                return
            self.close()
            needed = (
                "room there"
                if error.errno in NO_ROOM
                else "a file system with locks (flock) that takes writes"
            )
            raise ConfigError(
                f"{self.path / _LOCK} cannot be locked: {error.strerror}; the KV cache on disk needs {needed}"
            ) from error

    def manifest(self) -> Manifest | None:
        """Return what namespace.json says, None if it is missing or damaged."""
        try:
            return msgspec.json.decode(self._read(_MANIFEST), type=Manifest)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            logger.warning("%s cannot be read: %s", self.path / _MANIFEST, error)
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace namespace.json.

        Raises:
            OSError: the disk refuses it.
        """
        unfinished = f"{_MANIFEST}.new"
        fd = open_file(self.fd, unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            transfer_bytes(os.pwritev, fd, content, 0)
        finally:
            os.close(fd)
        os.rename(unfinished, _MANIFEST, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def segment_files(self) -> list[tuple[int, str]]:
        """Return number and name of each segment, in order.

        Raises:
            OSError: the directory cannot be read.
        """
        with os.scandir(self.fd) as entries:
            names = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        numbers = ((segment_number(name), name) for name in names)
        return sorted((number, name) for number, name in numbers if number is not None)

    def free_number(self, used: Collection[int]) -> int:
        """Return the smallest number whose name is free for a segment, and that is not among `used`.

        Raises:
            OSError: the directory cannot be read.
        """
        names = set(os.listdir(self.fd))
        numbers = (number for number in itertools.count(1) if number not in used)
        return next(number for number in numbers if segment_name(number) not in names)

    def remove_unfinished(self) -> None:
        """Delete files that a killed writer left unfinished.

        Raises:
            OSError: the disk refuses it.
        """
        for name in os.listdir(self.fd):
            if name.endswith(".new"):
                os.unlink(name, dir_fd=self.fd)

    def lock_files_within(self, seconds: float) -> bool:
        """Take the lock of the files, waiting for a bounded time; False if another process keeps it."""
        return lock_within(self.fd, seconds)

    def unlock_files(self) -> None:
        unlock(self.fd)

    def close(self) -> None:
        """Release the lock; once."""
        os.close(self.fd)
        if self._lock >= 0:
            os.close(self._lock)

    def _read(self, name: str) -> bytes:
        fd = open_file(self.fd, name, os.O_RDONLY)
        try:
            return os.read(fd, _MAX_MANIFEST_BYTES)
        finally:
            os.close(fd)


class Root:
    """The user's directory.

    Raises:
        ConfigError: it cannot be used, with the reason.
    """

    def __init__(self, directory: Path, *, create: bool) -> None:
        self.path = directory
        self.fd = open_root(directory, create=create)

    def open_namespace(
        self, namespace: Namespace, key: str | None, name: str | None = None, *, write: bool = True
    ) -> OpenNamespace:
        """Open a directory of a namespace, by default the first one, as its writer if it has none.

        The caller holds the lock of the root. With `write` false, it needs none, and the directory must exist.

        Raises:
            ConfigError: it holds rows of another namespace or key, or cannot be used.
            OSError: the disk does not work.
        """
        opened = OpenNamespace(self.fd, self.path, name or namespace.digest, create=write, write=write)
        try:
            self._check(opened, Manifest(dict(namespace.values), namespace.row_bytes, key))
        except (ConfigError, OSError):
            opened.close()
            raise
        return opened

    def open_own(self, namespace: Namespace, key: str | None) -> OpenNamespace:
        """Open the first directory of a namespace without a writer as its writer, or the first one without that.

        The caller holds the lock of the root.

        Raises:
            ConfigError, OSError: see `open_namespace`.
        """
        for number in range(MOST_WRITERS):
            opened = self.open_namespace(namespace, key, f"{namespace.digest}.{number}" if number else None)
            if opened.is_writer or opened.is_read_only:
                return opened
            opened.close()
        return self.open_namespace(namespace, key, write=False)

    def names_of(self, digest: str) -> list[str]:
        """Return the names of all directories of a namespace.

        Raises:
            OSError: the directory cannot be read.
        """
        return [name for name in self.digests() if name.partition(".")[0] == digest]

    def digests(self) -> list[str]:
        """Return the names of all directories of rows.

        Raises:
            OSError: the directory cannot be read.
        """
        with os.scandir(self.path) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def open_existing(self, digest: str) -> OpenNamespace:
        """Open a directory of rows by its name. The caller holds the lock of the root.

        Raises:
            ConfigError: it cannot be used.
        """
        return OpenNamespace(self.fd, self.path, digest, create=False)

    def num_bytes(self, digest: str) -> int:
        """Return the bytes of a namespace's segments when they are full: files are sparse until then."""
        return sum(
            status.st_size for name, status in self._statuses(digest) if segment_number(name) is not None
        )

    def last_use(self, digest: str) -> float:
        """Return the time of the last change, in seconds since the epoch."""
        return max((status.st_mtime for _, status in self._statuses(digest)), default=0.0)

    def oldest_first(self, names: Iterable[str]) -> list[str]:
        """Return directories in the order of their last use.

        A time well ahead of the clock is that of a wrong one, and must not keep its directory forever: it is first.

        Raises:
            OSError: one cannot be read.
        """
        latest = time.time() + CLOCK_ERROR_S
        times = {name: self.last_use(name) for name in names}
        return sorted(times, key=lambda name: (times[name] <= latest, times[name]))

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenNamespace | None]:
        """Yield a directory of rows, None if it cannot be used; the caller holds the lock of the root."""
        try:
            folder = self.open_existing(name)
        except ConfigError as error:
            logger.warning("%s is left alone: %s", self.path / name, error)
            yield None
            return
        try:
            yield folder
        finally:
            folder.close()

    def delete(self, digest: str) -> bool:
        """Delete a namespace unless a process writes to it. The caller holds the lock of the root.

        Raises:
            OSError: the disk does not work.
        """
        with self.opened(digest) as folder:
            if folder is None or not folder.is_writer:
                return False
            for _, file in folder.segment_files():
                discard(folder.fd, file)
            shutil.rmtree(digest, dir_fd=self.fd)
        logger.info("deleted the KV cache rows in %s to keep the limit of the directory", self.path / digest)
        return True

    def lock_within(self, seconds: float) -> bool:
        """Take the lock, waiting for a bounded time; False if another process keeps it."""
        return lock_within(self.fd, seconds)

    def unlock(self) -> None:
        unlock(self.fd)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock, waiting for it; others hold it for a moment only."""
        return locked(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def _statuses(self, digest: str) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self.path / digest) as entries:
            for entry in entries:
                try:
                    yield entry.name, entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # its writer has renamed or deleted it meanwhile
                    continue

    @staticmethod
    def _check(opened: OpenNamespace, manifest: Manifest) -> None:
        stored = opened.manifest()
        if stored is None:
            if opened.is_writer:
                _write(opened, manifest)
            return
        here = Namespace(manifest.values, manifest.row_bytes)
        here.check_same(Namespace(stored.values, stored.row_bytes), str(opened.path))
        if stored.key != manifest.key:
            raise ConfigError(
                f"the KV cache rows in {opened.path} were written {_with_key(stored.key)}, and this engine reads "
                f"{_with_key(manifest.key)}; give the same key, or another directory"
            )


def _write(opened: OpenNamespace, manifest: Manifest) -> None:
    """Write namespace.json, if the disk has room for it now; the next start tries again."""
    try:
        opened.write_manifest(manifest)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        logger.warning("%s cannot be written now: %s", opened.path / _MANIFEST, error.strerror)


def _with_key(fingerprint: str | None) -> str:
    return "without a key" if fingerprint is None else f"with the key of fingerprint {fingerprint}"
