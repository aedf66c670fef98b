# SPDX-License-Identifier: Apache-2.0
"""Digests over whole files, each read once and remembered. Torch-free."""

from __future__ import annotations

import hashlib
import logging
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
