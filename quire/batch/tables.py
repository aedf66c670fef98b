# SPDX-License-Identifier: Apache-2.0
"""Tables as inputs and outputs of batch jobs: CSV, TSV and JSON lines; `parquet.py` has Parquet.

Invariant: a table is read row by row, and written as a copy of itself with more columns. A malformed row is a row with
a fault, and the rows behind it are read.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

import msgspec

from quire.batch.line_file import replacement
from quire.batch.lines import bounded_lines
from quire.errors import ConfigError
from quire.plugins import import_place

Cells = dict[str, Any]


class AddedValues(NamedTuple):
    """Values of the columns that a job adds to a row; None where there is nothing to say.

    `prompt_hash` is hexadecimal: by it a later run notices that a row's prompt has changed.
    """

    text: str | None
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_hash: str


def added_names(column: str) -> tuple[str, ...]:
    """Return the names of the added columns; that of the answer's text is the first."""
    return (column, *(f"{column}_{field}" for field in AddedValues._fields[1:]))


@dataclass(frozen=True)
class TableRow:
    """Values of a row by column, and what is wrong with it ("": nothing)."""

    cells: Cells
    fault: str = ""


class TableFile(ABC):
    """File with rows.

    Args:
        max_bytes: limit of a row, or of a field.

    Attributes:
        columns: names of all rows' columns; None: each row names its own.

    Raises:
        ConfigError: it is no table of its kind.
        OSError: it cannot be read.
    """

    columns: tuple[str, ...] | None = None

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes

    @abstractmethod
    def rows(self) -> Iterator[TableRow]:
        """Read the rows from the first on."""

    @abstractmethod
    def copy(
        self, path: Path, names: Sequence[str], added: Iterator[AddedValues], *, json_answers: bool
    ) -> None:
        """Write the table with more columns to `path`, which it replaces once it is complete.

        Args:
            names: of the added columns, which the table does not have.
            added: their values, for at least as many rows as there are.
            json_answers: the first of them is the text of a JSON value, which a format with values shows as such.
        """


class CsvTable(TableFile):
    """CSV file with a header: UTF-8, fields in double quotes where they need it."""

    delimiter: ClassVar[str] = ","

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        super().__init__(path, max_bytes=max_bytes)
        csv.field_size_limit(max_bytes)  # the module has one limit for all readers
        with self._records() as records:
            header = next(records, ([], ""))
        self.columns = tuple(header[0])
        if header[1]:
            raise ConfigError(f"{path}: the header cannot be read: {header[1]}")
        repeated = {name for name in self.columns if self.columns.count(name) > 1}
        if repeated:
            raise ConfigError(f"{path}: the header has {', '.join(sorted(map(repr, repeated)))} twice")

    def rows(self) -> Iterator[TableRow]:
        assert self.columns is not None
        with self._records() as records:
            next(records, None)
            for fields, fault in records:
                yield TableRow(dict(zip(self.columns, fields, strict=False)), fault or self._fault(fields))

    def copy(
        self, path: Path, names: Sequence[str], added: Iterator[AddedValues], *, json_answers: bool
    ) -> None:
        assert self.columns is not None
        width = len(self.columns)
        with replacement(path) as out, self._records() as records:
            text = _TextWriter(out)
            writer = csv.writer(text, delimiter=self.delimiter, lineterminator="\r\n")
            if next(records, None) is not None:
                writer.writerow([*self.columns, *names])
            for (fields, _), more in zip(records, added, strict=False):
                cells = [*fields[:width], *[""] * (width - len(fields))]
                writer.writerow([*cells, *map(_field, more)])

    def _fault(self, fields: list[str]) -> str:
        assert self.columns is not None
        if len(fields) != len(self.columns):
            return f"the row has {len(fields)} fields, the header {len(self.columns)}"
        if any("\udc80" <= char <= "\udcff" for field in fields for char in field):
            return "the row is not UTF-8"
        return ""

    @contextmanager
    def _records(self) -> Iterator[Iterator[tuple[list[str], str]]]:
        # What is not UTF-8 passes through, so that a copy has the same bytes.
        with open(self._path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield self._read(file)

    def _read(self, file: TextIO) -> Iterator[tuple[list[str], str]]:
        reader = csv.reader(file, delimiter=self.delimiter, strict=True)
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield [], f"the row is no CSV: {error}"
                continue
            if fields:
                yield fields, ""


class TsvTable(CsvTable):
    """The same with tabs between the fields."""

    delimiter = "\t"


class _TextWriter:
    """Text file on a binary one, with the encoding of `CsvTable`, for the rows of a CSV writer.

    The writer puts fields in quotes that have a character of its line end, so that is both; a row ends in a newline.
    """

    def __init__(self, out: Any) -> None:
        self._out = out

    def write(self, text: str) -> None:
        self._out.write(text.removesuffix("\r\n").encode(errors="surrogateescape") + b"\n")


class JsonLinesTable(TableFile):
    """JSON lines: an object for each row; blank lines are skipped."""

    def rows(self) -> Iterator[TableRow]:
        for line in self._lines():
            yield _json_row(line, self._max_bytes)

    def copy(
        self, path: Path, names: Sequence[str], added: Iterator[AddedValues], *, json_answers: bool
    ) -> None:
        decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        with replacement(path) as out:
            for line, more in zip(self._lines(), added, strict=False):
                try:
                    cells: Cells = dict(decoder.decode(line or b"{}"))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    cells = {}  # the row's fault is among the added columns
                cells |= dict(zip(names, more, strict=True))
                if json_answers and cells[names[0]] is not None:
                    on_one_line = msgspec.json.format(cells[names[0]].encode(), indent=-1)
                    cells[names[0]] = msgspec.Raw(on_one_line)
                out.write(msgspec.json.encode(cells) + b"\n")

    def _lines(self) -> Iterator[bytes | None]:
        with open(self._path, "rb") as file:
            yield from bounded_lines(file, self._max_bytes)


def _json_row(line: bytes | None, max_bytes: int) -> TableRow:
    if line is None:
        return TableRow({}, f"the line is longer than {max_bytes} bytes")
    try:
        cells = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return TableRow({}, f"the line is not JSON: {error}")
    return TableRow(cells) if isinstance(cells, dict) else TableRow({}, "the line is no JSON object")


def _field(value: Any) -> str:
    return "" if value is None else str(value)


FORMATS = {
    ".csv": "quire.batch.tables:CsvTable",
    ".tsv": "quire.batch.tables:TsvTable",
    ".jsonl": "quire.batch.tables:JsonLinesTable",
    ".ndjson": "quire.batch.tables:JsonLinesTable",
    ".parquet": "quire.batch.parquet:ParquetTable",
}  # Suffix -> `Table`.


def open_table(path: Path, *, max_bytes: int) -> TableFile:
    """Return the table in a file, by the suffix of its name.

    Raises:
        ConfigError: there is no such format, pyarrow is missing, or the file has another format.
        OSError: the file cannot be read.
    """
    table: TableFile = import_place(FORMATS[format_of(path)])(path, max_bytes=max_bytes)
    return table


def format_of(path: Path) -> str:
    """Return the suffix that names a file's format; raises ConfigError if there is no such format."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{path}: the name of a table ends in one of {', '.join(FORMATS)}")
    return suffix
