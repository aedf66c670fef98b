"""The file of a batch's answers, in which nothing that is there is lost.

Invariant: a regular file with content is refused, continued behind its last whole line, or replaced when the new
answers are complete; and one run at a time writes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

ID_PREFIX = "batch_req_"
BEGIN = f'{{"id":"{ID_PREFIX}'.encode()
"""Of each line."""
Answered = Counter[str | None]
"""How many lines there are for each custom_id; None: of lines of the input that have none."""


class _Answer(msgspec.Struct):
    custom_id: str | None
    id: str


@contextmanager
def opened_output(path: Path, *, overwrite: bool, resume: bool) -> Iterator[tuple[FileIO, Answered]]:
    """Open the file for answers, and say which are in it.

    Raises:
        ConfigError: it has content and is neither to be replaced nor continued, or is none of answers, or another run
            writes it.
        OSError: it cannot be opened.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which keeps nothing
        with open(path, "wb", buffering=0) as out:
            yield out, Answered()
        return
    has_content = path.exists() and path.stat().st_size > 0
    if has_content and not (overwrite or resume):
        raise ConfigError(
            f"{path} has content; --resume goes on behind its answers, --overwrite replaces it once the new ones are "
            "there"
        )
    if has_content and overwrite:
        with _replacement(path.resolve()) as out:
            yield out, Answered()
        return
    with open(path, "r+b" if path.exists() else "x+b", buffering=0) as out:
        _lock(out, path)
        yield out, _continue(out, path)


@contextmanager
def _replacement(path: Path) -> Iterator[FileIO]:
    """A file beside this one that takes its place at the end; after an error it stays, under its own name."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with open(path, "rb", buffering=0) as old, open(draft, "xb", buffering=0) as out:
        try:
            _lock(old, path)
            yield out
        except BaseException:
            if out.tell():
                logger.warning("%s is as it was; the answers so far are in %s", path, draft)
            else:
                draft.unlink()
            raise
        draft.replace(path)


def _lock(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is being written by another run") from None
    except OSError:
        return  # a file system without locks


def _continue(out: FileIO, path: Path) -> Answered:
    """Read the answers, cut off a last line that is not whole, and stand behind the others."""
    answered, end, number = Answered(), 0, 0
    decoder = msgspec.json.Decoder(_Answer)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") and BEGIN.startswith(line[: len(BEGIN)]):
                break
            try:
                answered[decoder.decode(line).custom_id] += 1
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise ConfigError(
                    f"{path}: line {number} is no answer of a batch, so it is left as it is"
                ) from None
            end += len(line)
    out.truncate(end)
    out.seek(end, os.SEEK_SET)
    return answered
