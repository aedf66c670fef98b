# SPDX-License-Identifier: Apache-2.0
"""Answers of a table's rows while the job runs: a file of JSON lines beside the output.

Invariant: an entry names its row by number (from 0) and by a digest of its prompt, so a changed table or template is
noticed. In memory are 16 bytes a row. Once all rows have an entry, the output is made of the journal, which is removed.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from quire.batch.line_file import LineFile, drop_lines, opened_lines, replacement
from quire.batch.tables import AddedValues
from quire.errors import ConfigError, QuireError

BEGIN = b'{"row":'
FAULTY = 0  # In place of the digest of a row that has a fault and so no prompt.
_NONE = -1


class JournalEntry(msgspec.Struct):
    """Answer to one row, and the digest of its prompt; the other fields are those of `AddedValues`."""

    row: int
    prompt: int
    text: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def added(self) -> AddedValues:
        return AddedValues(
            self.text,
            self.error,
            self.finish_reason,
            self.prompt_tokens,
            self.completion_tokens,
            f"{self.prompt:016x}",
        )


_entry = msgspec.json.Decoder(JournalEntry)


def digest_of(prompt: str) -> int:
    """Return a number of 63 bits that stands for a prompt."""
    return int.from_bytes(hashlib.sha256(prompt.encode(errors="surrogatepass")).digest()[:8]) >> 1


class Journal:
    """Open journal.

    Attributes:
        num_failed: entries with an error.

    Raises:
        ConfigError: the file has lines of another kind.
    """

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._offsets, self._prompts = array("q"), array("q")
        self.num_failed = 0
        for number, (offset, line) in enumerate(lines.read(), 1):
            try:
                entry = _entry.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise lines.foreign(number) from None
            self._note(entry, offset)

    def add(self, entry: JournalEntry) -> None:
        """Write an entry; raises QuireError if it cannot be written."""
        self._note(entry, self._lines.append(entry))

    def has(self, row: int, prompt: int) -> bool:
        """Return whether a row has an entry.

        Raises:
            ConfigError: the entry answers another prompt.
        """
        if row >= len(self._offsets) or self._offsets[row] == _NONE:
            return False
        if self._prompts[row] not in (prompt, FAULTY):
            raise ConfigError(
                f"{self._lines.path}: row {row + 1} was answered for another prompt: the table, --prompt or --system "
                "has changed; give another output file, or --overwrite to start anew"
            )
        return True

    def added(self) -> Iterator[AddedValues]:
        """Yield the values of all rows, in order, without end.

        Raises:
            QuireError: a row has no entry.
        """
        assert self._lines.path is not None
        self._lines.sync()
        with open(self._lines.path, "rb") as file:
            for offset in itertools.takewhile(lambda offset: offset != _NONE, self._offsets):
                file.seek(offset)
                yield _entry.decode(file.readline()).added
        raise QuireError("a row has no answer: the table has changed while the job ran")

    @property
    def is_empty(self) -> bool:
        return self._lines.is_empty

    def _note(self, entry: JournalEntry, offset: int) -> None:
        missing = entry.row + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([_NONE] * missing)
            self._prompts.extend([_NONE] * missing)
        self._offsets[entry.row], self._prompts[entry.row] = offset, entry.prompt
        self.num_failed += entry.error is not None


def write_journal(path: Path, entries: Iterable[JournalEntry]) -> None:
    """Write a whole journal; until it is complete there is none."""
    with replacement(path) as out:
        for entry in entries:
            out.write(msgspec.json.encode(entry) + b"\n")


@contextmanager
def opened_journal(path: Path, *, anew: bool, retry_failed: bool) -> Iterator[Journal]:
    """Open a journal for this process only.

    Args:
        anew: drop all its entries.
        retry_failed: drop the entries with an error.

    Raises:
        ConfigError: another process writes it, or it is no journal.
        OSError: it cannot be opened or rewritten.
    """
    if retry_failed and not anew and path.exists():
        drop_lines(path, BEGIN, lambda line: _entry.decode(line).error is not None)
    with opened_lines(path, BEGIN, anew=anew) as lines:
        yield Journal(lines)
