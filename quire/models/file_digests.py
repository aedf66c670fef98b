# SPDX-License-Identifier: Apache-2.0
"""Digests over whole files, each read once and remembered, and a fingerprint that reads only parts. Torch-free."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from quire.models.bounded_directory import BoundedDirectory

logger = logging.getLogger(__name__)

DIGITS = 64
MOST_BYTES = 2**20


class FileDigests:
    """SHA-256 digests of files, remembered in the user's cache by path, size, times and inode.

    Args:
        cache: the user's cache directory; None: nothing is remembered.
    """

    def __init__(self, cache: Path | None) -> None:
        self._directory = (
            None if cache is None else BoundedDirectory(cache / "quire" / "digests", "sha256", MOST_BYTES)
        )

    def digest_of(self, path: Path) -> str:
        """Return 64 hexadecimal digits.

        Raises:
            OSError: the file cannot be read.
        """
        if self._directory is None:
            return digest_of_file(path)
        status = path.stat()
        state = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        place = self._directory.place("weights", hashlib.sha256(repr(state).encode()).hexdigest())
        try:
            known = place.read_text(errors="replace")
            if len(known) == DIGITS:
                return known
        except OSError:  # it is not known yet, or cannot be read and is made anew
            pass
        known = digest_of_file(path)
        try:
            with self._directory.new_file(place, DIGITS) as file:
                file.write(known.encode())
        except OSError as error:
            logger.info("the digest of %s is not remembered: %s", path.name, error)
        return known


def digest_of_file(path: Path) -> str:
    """Read a file for its digest."""
    logger.info("reading %s for its digest, once", path.name)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


EDGE_BYTES = 1 << 16
"""Bytes hashed at each end of a file: headers of tensor files, and numbers that another training run would change."""


def checkpoint_fingerprint(directory: Path) -> bytes:
    """Return `files_fingerprint` of all files of a checkpoint."""
    return files_fingerprint(
        [directory] if directory.is_file() else [path for path in directory.iterdir() if path.is_file()]
    )


def files_fingerprint(files: Iterable[Path]) -> bytes:
    """Return a digest of names, sizes, first and last bytes of files; it does not depend on where they are."""
    digest = sha256()
    for path in sorted(files):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}\n".encode() + file.read(EDGE_BYTES))
            file.seek(max(size - EDGE_BYTES, 0))
            digest.update(file.read(EDGE_BYTES))
    return digest.digest()
