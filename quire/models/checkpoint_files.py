# SPDX-License-Identifier: Apache-2.0
"""Access to the files of a checkpoint: regular files only, of bounded size.

Invariant: torch-free. A name that exists and is no regular file (directory, dangling link, pipe, device) is an error
that names it; it never counts as absent, and opening it never blocks.
"""

from __future__ import annotations

import codecs
import stat
from pathlib import Path

from quire.errors import ModelLoadError

MAX_TEXT_BYTES = 64 * 1024 * 1024  # limit of a JSON file or chat template; tokenizer.json has its own
MODULES = "modules.json"  # of sentence-transformers; it names folders with further files
TEMPLATE_FOLDER = "additional_chat_templates"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(path: Path) -> bool:
    """Return whether a checkpoint has this file.

    Raises:
        ModelLoadError: the name exists, and is no regular file or cannot be examined.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ModelLoadError(f"{path}: is a symbolic link whose target does not exist") from None
        return False
    except OSError as error:  # a loop of links, a directory that may not be searched
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise ModelLoadError(f"{path}: is no file but {kind}; it must be a regular file")
    return True


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        ModelLoadError: there is no such file, or it is no regular one.
    """
    if not has_file(path):
        raise ModelLoadError(f"{path}: no such file")
    return path.stat().st_size


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        ModelLoadError: as `size_of`; the file is larger than `max_bytes`, or cannot be read.
    """
    size = size_of(path)
    if size > max_bytes:
        raise ModelLoadError(f"{path}: has {size} bytes, more than the limit of {max_bytes} for such a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises:
        ModelLoadError: as `read_bytes`; the content is not UTF-8.
    """
    content = read_bytes(path, max_bytes).removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: is not UTF-8 text, by its byte {error.start}") from None


def unreadable(path: Path, error: OSError) -> ModelLoadError:
    """Return the error for a file that the system does not let us read."""
    return ModelLoadError(f"{path}: cannot be read: {error.strerror}")
