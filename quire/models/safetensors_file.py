# SPDX-License-Identifier: Apache-2.0
"""Reader of one safetensors file, through a memory map or past it.

Format: 8 bytes with the little-endian header size, a JSON header {name: {dtype, shape, data_offsets}}, then the data,
which the tensors cover without gap or overlap.
Invariant: the whole header is checked before any tensor is returned, so no tensor reaches outside the file.
"""

import json
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.slot import Box
from quire.models.checkpoint_files import size_of, unreadable
from quire.models.tensor_file import TensorInfo

MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """Checked, mapped file; `tensors` holds its tensors by name, in the order of the data.

    Args:
        called: maps a tensor's name in the file to its key in `tensors`.

    Raises:
        ModelLoadError: the file cannot be read, is truncated or malformed; the message names file and tensor.
    """

    def __init__(self, path: Path, called: Callable[[str], str] = str) -> None:
        self.path = path
        size = size_of(path)
        try:
            self._file = path.open("rb")
            weakref.finalize(self, self._file.close)
            header = self._read_header(self._file.read(8), size, self._file)
            # A private writable map: torch wants writable memory, and nothing ever reaches the file.
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise unreadable(self.path, error) from error
        data_start = size - self._data_size
        infos = [
            self._info(name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
        ]
        infos.sort(key=lambda info: (info.start, info.end))
        self._check_cover(infos, data_start, size)
        self.tensors = {called(info.name): info for info in infos}
        if len(self.tensors) != len(infos):
            raise self._error("a tensor is there twice, under names that mean the same")

    def tensor(self, info: TensorInfo) -> Tensor:
        """Return a tensor in the file's memory; its bytes are read when they are first touched."""
        raw = self.raw(info.start, info.end)
        aligned = raw if info.start % info.dtype.itemsize == 0 else raw.clone()
        return aligned.view(info.dtype).view(info.shape)

    def in_floats(self, info: TensorInfo) -> TensorInfo:
        """Return the tensor itself: the file has no encodings."""
        return info

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        """Return a part of a tensor, in the file's memory if the tensor is."""
        return self.tensor(info)[box]

    def raw(self, start: int, end: int) -> Tensor:
        """Return bytes of the file, header included: uint8 [end - start]."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=start)

    def read_into(self, start: int, memory: Tensor) -> None:
        """Fill memory, uint8, with the file from byte `start` on, past the map; thread-safe.

        Raises:
            ModelLoadError: the file was truncated after it was checked, or cannot be read.
        """
        rest = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy 2 on Python 3.11
        while len(rest):
            try:
                count = os.preadv(self._file.fileno(), [rest], start)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if count == 0:
                raise self._error(f"truncated: it ends before byte {start + len(rest)}")
            start, rest = start + count, rest[count:]

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        """Fill memory, as `read_into` does, with a box of a tensor; the rest is not read."""
        position = 0
        for start, num_bytes in _runs(info, box):
            self.read_into(start, memory[position : position + num_bytes])
            position += num_bytes

    def release(self, info: TensorInfo) -> None:
        """Return a tensor's memory to the system; a later access reads the file again."""
        start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, info.end - start)

    def _read_header(self, prefix: bytes, file_size: int, file: Any) -> dict[str, Any]:
        header_size = int.from_bytes(prefix, "little")
        limit = min(MAX_HEADER_BYTES, file_size - 8)
        if len(prefix) < 8 or not 2 <= header_size <= limit:
            raise self._error(
                f"no safetensors file: header of {header_size} bytes, at most {max(limit, 0)} possible"
            )
        self._data_size = file_size - 8 - header_size
        try:
            header = json.loads(file.read(header_size), object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._error(f"the header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("the header is no JSON object")
        return header

    def _info(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        """Check one header entry by itself."""
        values: dict[str, Any] = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._error(
                f"tensor {name!r} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}"
            )
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"tensor {name!r} has a malformed shape or data_offsets")
        needed, given = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
        if needed != given:
            raise self._error(
                f"tensor {name!r}: {dtype} {shape} needs {needed} bytes, but data_offsets span {given}"
            )
        return TensorInfo(name, DTYPES[dtype], tuple(shape), data_start + offsets[0], data_start + offsets[1])

    def _check_cover(self, infos: list[TensorInfo], data_start: int, size: int) -> None:
        """Check that the tensors, in order, cover the data exactly."""
        position = data_start
        for info in infos:
            if info.end > size:
                raise self._error(f"truncated: tensor {info.name!r} ends at byte {info.end} of {size}")
            if info.start != position:
                problem = (
                    "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
                )
                raise self._error(f"tensor {info.name!r} {problem} (byte {info.start}, expected {position})")
            position = info.end
        if position != size:
            raise self._error(f"{size - position} bytes after the last tensor belong to none")

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}")


def _runs(info: TensorInfo, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of a box in the file: (start, number of bytes), in the order of its elements."""
    strides = [math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize for dim in range(len(box))]
    dim = len(box) - 1
    while dim > 0 and box[dim] == slice(0, info.shape[dim]):
        dim -= 1
    if dim < 0:
        yield info.start, info.end - info.start
        return
    num_bytes = (box[dim].stop - box[dim].start) * strides[dim]
    for index in product(*(range(side.start, side.stop) for side in box[:dim])):
        places = (*index, box[dim].start)
        yield (
            info.start + sum(place * stride for place, stride in zip(places, strides, strict=False)),
            num_bytes,
        )


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values
