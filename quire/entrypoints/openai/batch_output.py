"""Output file of a batch run; existing answers are never lost.

Invariant: a regular file with content is rejected, continued behind its last complete line, or replaced once the new
answers are complete. Only one run writes it at a time.
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
BEGIN = f'{{"id":"{ID_PREFIX}'.encode()  # Start of each output line.
Answered = Counter[str | None]  # Number of output lines by custom_id; None: input lines without one.


class _Answer(msgspec.Struct):
    custom_id: str | None
    id: str


@contextmanager
def opened_output(path: Path, *, overwrite: bool, resume: bool) -> Iterator[tuple[FileIO, Answered]]:
    """Open the output file, and count the answers that it already holds.

    Raises:
        ConfigError: it has content and is neither to be replaced nor continued, it holds no batch answers, or another
            run is writing it.
        OSError: it cannot be opened.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which stores nothing
        with open(path, "wb", buffering=0) as out:
            yield out, Answered()
        return
    has_content = path.exists() and path.stat().st_size > 0
    if has_content and not (overwrite or resume):
        raise ConfigError(
            f"{path} has content; --resume continues behind its answers, --overwrite replaces it once the new ones are "
            "complete"
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
    """Yield a temporary file that replaces `path` at the end; after an error the temporary file stays."""
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
    """Count the answers, cut off an incomplete last line, and seek behind the others."""
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
