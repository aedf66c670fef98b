# SPDX-License-Identifier: Apache-2.0
"""Reader of one GGUF file: its metadata and the positions of its tensors.

Format (versions 2 and 3, little-endian): magic, version, numbers of tensors and keys; each key with its type and value;
each tensor with its name, shape (the fastest dimension first), type and position; from the next multiple of the
alignment on, the tensors.
Invariant: torch-free. Everything is checked against the file's size before it is read, so a count costs no more memory
than the file has bytes for it, and no tensor reaches outside the file or into another.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

from quire.config.encoding import OTHERS, READ, TensorType
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import size_of, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MAX_NESTING = 4
_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS: dict[int, Struct] = {
    code: Struct(f"<{kind}")
    for code, kind in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9
_LEAST_KEY = 8 + 4 + 1
"""Minimum bytes of a key: its name's length, its type, a value."""
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorEntry:
    """Tensor; `shape` has the rows' length last, `start` and `end` are byte positions in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row along the last dimension."""
        return self.shape[-1] // self.type.size * self.type.num_bytes


class Metadata(Mapping[str, Any]):
    """Values of a file by key. Numbers are int, float or bool, strings are str, arrays are lists of these.

    An array of strings is decoded at its first access: a vocabulary of 150,000 takes 0.1 s, and a process that loads
    weights does not need it.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Strings):
            value = self._values[key] = value.decoded()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GgufFile:
    """Checked, mapped file: `metadata` by key, `tensors` by name in the order of the data.

    Raises:
        ModelLoadError: the file cannot be read, is truncated or malformed, or has a tensor of an
            unsupported type; the message names file, key or tensor, and the values that disagree.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = size_of(path)
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                if magic != MAGIC:
                    raise self._error(f"no GGUF file: it begins with {magic!r}, not {MAGIC!r}{_hint(magic)}")
                # A private writable map: torch wants writable memory, and nothing ever reaches the file.
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise unreadable(path, error) from error
        self._place = len(MAGIC)
        num_tensors, num_keys = self._read_counts()
        self.metadata = Metadata(self._read_metadata(num_keys))
        entries = [self._read_entry() for _ in range(num_tensors)]
        self.tensors = self._placed(entries)

    def release(self, entry: TensorEntry) -> None:
        """Return a tensor's memory to the system; a later access reads the file again."""
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)

    def _read_counts(self) -> tuple[int, int]:
        version = int(self._number(_U32, "the version"))
        if version not in VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            hint = ", of a big-endian file," if turned else ""
            unwritten = _hint(version.to_bytes(4, "little"))
            raise self._error(
                f"version {version}{hint} is not supported; it must be little-endian, 2 or 3{unwritten}"
            )
        num_tensors = int(self._number(_U64, "the number of tensors"))
        num_keys = int(self._number(_U64, "the number of keys"))
        self._check_count("tensors", num_tensors, _LEAST_TENSOR)
        self._check_count("keys", num_keys, _LEAST_KEY)
        return num_tensors, num_keys

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"the name of key {index}")
            if key in metadata:
                raise self._error(f"key {key!r} appears twice")
            metadata[key] = self._value(int(self._number(_U32, f"the type of {key!r}")), key)
        return metadata

    def _value(self, code: int, key: str, depth: int = 0) -> Any:
        if code == _STRING:
            return self._string(f"the value of {key!r}")
        if code == _ARRAY:
            return self._array(key, depth)
        if code not in _SCALARS:
            raise self._error(f"key {key!r} has the unknown type {code}; known are 0 to 12")
        return self._number(_SCALARS[code], f"the value of {key!r}")

    def _array(self, key: str, depth: int) -> list[Any] | _Strings:
        if depth == MAX_NESTING:
            raise self._error(f"key {key!r} nests arrays more than {MAX_NESTING} deep")
        code = int(self._number(_U32, f"the type of {key!r}"))
        count = int(self._number(_U64, f"the length of {key!r}"))
        if code == _STRING:
            return self._strings(count, key)
        if code not in _SCALARS:
            self._check_count(f"values of {key!r}", count, 8)
            return [self._value(code, key, depth + 1) for _ in range(count)]
        kind = _SCALARS[code]
        self._check_count(f"values of {key!r}", count, kind.size)
        start = self._take(count * kind.size, f"the values of {key!r}")
        return list(Struct(f"<{count}{kind.format[1:]}").unpack_from(self.map, start))

    def _read_entry(self) -> TensorEntry:
        """Read and check one tensor by itself; its `start` is still relative to the data."""
        name = self._string("the name of a tensor")
        num_dims = int(self._number(_U32, f"the shape of tensor {name!r}"))
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(
                f"tensor {name!r} has {num_dims} dimensions, at least 1 and at most {MAX_DIMS} possible"
            )
        sides = [int(self._number(_U64, f"the shape of tensor {name!r}")) for _ in range(num_dims)]
        if 0 in sides:
            raise self._error(f"tensor {name!r} has shape {sides[::-1]}, and must have elements")
        kind = self._tensor_type(name, int(self._number(_U32, f"the type of tensor {name!r}")))
        start = int(self._number(_U64, f"the place of tensor {name!r}"))
        if sides[0] % kind.size:
            raise self._error(
                f"tensor {name!r}: rows of {sides[0]} are no multiple of {kind.name}'s blocks of {kind.size}"
            )
        num_bytes = math.prod(sides) // kind.size * kind.num_bytes
        return TensorEntry(name, kind, tuple(reversed(sides)), start, start + num_bytes)

    def _tensor_type(self, name: str, code: int) -> TensorType:
        if code not in READ:
            known = ", ".join(kind.name for kind in READ.values())
            raise self._error(
                f"tensor {name!r} is of type {OTHERS.get(code, code)}, which quire does not read; known are {known}"
            )
        return READ[code]

    def _placed(self, entries: list[TensorEntry]) -> dict[str, TensorEntry]:
        """Return the tensors at their positions in the file, checked not to overlap."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(
                f"general.alignment is {alignment!r}; it must be a power of two in [8, {MAX_ALIGNMENT}]"
            )
        data = -(-self._place // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
            if entry.name in placed:
                raise self._error(f"tensor {entry.name!r} appears twice")
            if entry.start % alignment:
                raise self._error(
                    f"tensor {entry.name!r} begins at byte {entry.start} of the data, no multiple of {alignment}"
                )
            whole = TensorEntry(entry.name, entry.type, entry.shape, data + entry.start, data + entry.end)
            if whole.end > self._size:
                raise self._error(
                    f"truncated: tensor {whole.name!r} ends at byte {whole.end} of {self._size}"
                )
            placed[whole.name] = whole
        for one, other in pairwise(placed.values()):
            if other.start < one.end:
                raise self._error(
                    f"tensor {other.name!r} begins at byte {other.start}, and {one.name!r} before it ends at {one.end}"
                )
        return placed

    def _strings(self, count: int, key: str) -> _Strings:
        """Return the places of `count` strings, which are decoded later."""
        self._check_count(f"values of {key!r}", count, _U64.size)
        unpack, data, place = _U64.unpack_from, self.map, self._place
        ends: list[int] = []
        add = ends.append  # a vocabulary has hundreds of thousands
        try:
            for _ in range(count):
                place += _U64.size + unpack(data, place)[0]
                add(place)
        except (StructError, OverflowError):  # a length lies outside the file
            place = self._size + 1
        if place > self._size:
            number = bisect_right(ends, self._size)
            raise self._error(
                f"truncated: value {number} of {key!r} ends after byte {self._size}, the file's last"
            )
        begin, self._place = self._place, place
        return _Strings(self.path, self.map, key, begin, ends)

    def _string(self, what: str) -> str:
        length = int(self._number(_U64, what))
        start = self._take(length, what)
        try:
            return self.map[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise _no_text(self.path, what, error) from None

    def _number(self, kind: Struct, what: str) -> Any:
        return kind.unpack_from(self.map, self._take(kind.size, what))[0]

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance over `num_bytes` of the file and return their start."""
        start = self._place
        if num_bytes > self._size - start:
            raise self._error(f"truncated: {what} ends at byte {start + num_bytes} of {self._size}")
        self._place = start + num_bytes
        return start

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        most = (self._size - self._place) // least_bytes
        if count > most:
            raise self._error(f"truncated: it has room for {most} of its {count} {what}")

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}")


@dataclass(frozen=True)
class _Strings:
    """Array of strings in a file's map: each follows its length, and ends at one of `ends`."""

    path: Path
    map: mmap.mmap
    key: str
    begin: int
    ends: Sequence[int]

    def decoded(self) -> list[str]:
        """Return the strings; raises ModelLoadError as `GgufFile` does."""
        data, what = self.map[: self.ends[-1]] if self.ends else b"", f"a value of {self.key!r}"
        starts = [self.begin, *self.ends]
        try:
            return [
                data[start + _U64.size : end].decode() for start, end in zip(starts, self.ends, strict=False)
            ]
        except UnicodeDecodeError as error:
            raise _no_text(self.path, what, error) from None


def _no_text(path: Path, what: str, error: UnicodeDecodeError) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what} is no UTF-8, by its byte {error.start}")


def _hint(content: bytes) -> str:
    """Return a hint if the content is zeros: a download reserves a file's room before it fills it."""
    return (
        ": it has zeros there, as a file that was never written to its end"
        if content and not any(content)
        else ""
    )
