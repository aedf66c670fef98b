# SPDX-License-Identifier: Apache-2.0
"""Checkpoint fingerprint that does not read all of the files."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

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
