# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GGUF file for the loader, under the names of our modules.

Invariant: a quantized tensor is read as bytes, uint8 [..., bytes of a row], or dequantized. A row consists of whole
blocks, so a float read decodes only the requested range, rounded to blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.quantized.ggml import dequantized
from quire.layers.slot import Box
from quire.models.gguf.config import architecture_of
from quire.models.gguf.file import GgufFile, TensorEntry
from quire.models.gguf.model import GgufModel, forget_files
from quire.models.gguf.projector import ENCODER, FRAMES, PLUS_ONE, read_projector
from quire.models.gguf.shapes import Listed, TensorPlace, TensorPlaces, place_of
from quire.models.tensor_file import TensorFile, TensorInfo

INVERSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "negative_exp": lambda made: made.neg().log(),
    PLUS_ONE: lambda made: made - 1,
}
"""Inverses of the converter's transformations."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """Tensor under its name in the model."""

    entry: TensorEntry
    made_by: str | None = None


class GgufTensorFile:
    """See `TensorFile`; `places` are the architecture's."""

    def __init__(self, file: GgufFile, places: TensorPlaces) -> None:
        self.path: Path = file.path
        self._file = file
        tensors = [tensor for entry in file.tensors.values() for tensor in _in_model(entry, places)]
        self.tensors: Mapping[str, GgufTensor] = {tensor.name: tensor for tensor in tensors}

    def in_floats(self, info: TensorInfo) -> TensorInfo:
        assert isinstance(info, GgufTensor), "one of `tensors`"
        return replace(info, dtype=_FLOATS.get(info.entry.type.name, torch.float32), shape=_shape_of(info))

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        assert isinstance(info, GgufTensor), "one of `tensors`"
        kind, num_bytes = info.entry.type, info.end - info.start
        raw = torch.frombuffer(self._file.map, dtype=torch.uint8, count=num_bytes, offset=info.start)
        if info.dtype is torch.uint8 or not kind.is_quantized:
            stored = raw.view(info.dtype).view(info.shape)[box]
            return stored if info.made_by is None else self._inverted(info, stored)
        *rows, columns = box
        first, last = columns.start // kind.size, -(-columns.stop // kind.size)
        blocks = slice(first * kind.num_bytes, last * kind.num_bytes)
        numbers = dequantized(kind, raw.view(*info.shape[:-1], -1)[(*rows, blocks)])
        return numbers[..., columns.start - first * kind.size : columns.stop - first * kind.size]

    def _inverted(self, info: GgufTensor, made: Tensor) -> Tensor:
        assert info.made_by is not None, "asked for"
        numbers = INVERSES[info.made_by](made)
        if not numbers.isfinite().all():
            raise ModelLoadError(
                f"{self.path}: tensor {info.entry.name!r} has values that this model cannot have"
            )
        return numbers

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        memory.copy_(self.part(info, box).contiguous().view(-1).view(torch.uint8))

    def release(self, info: TensorInfo) -> None:
        assert isinstance(info, GgufTensor), "one of `tensors`"
        self._file.release(info.entry)


class MadeTensors:
    """Small tensors that are made of a file's contents; see `TensorFile`."""

    def __init__(self, path: Path, numbers: Mapping[str, Tensor]) -> None:
        self.path = path
        self._numbers = numbers
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, numbers.dtype, tuple(numbers.shape), 0, 0)
            for name, numbers in self._numbers.items()
        }

    def in_floats(self, info: TensorInfo) -> TensorInfo:
        return info

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        return self._numbers[info.name].reshape(info.shape)[box]

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        memory.copy_(self.part(info, box).contiguous().view(-1).view(torch.uint8))

    def release(self, info: TensorInfo) -> None:
        """Do nothing: they are not in the file's map."""


def gguf_tensor_files(path: Path) -> list[TensorFile]:
    """Return the files of a GGUF model.

    Raises:
        ModelLoadError: as `GgufModel`.
        UnsupportedModelError: quire does not know the architecture.
    """
    model = GgufModel(path)
    forget_files()  # they stay mapped no longer than the tensors are read
    if model.architecture == ENCODER:
        return _projector_files(model)
    row = architecture_of(model)
    listed = [_listed_parameters(model, row.listed)] if row.listed else []
    return [*(GgufTensorFile(file, row.places) for file in model.files), *listed]


def _projector_files(model: GgufModel) -> list[TensorFile]:
    projector = read_projector(model.path)
    files: list[TensorFile] = [GgufTensorFile(file, projector.places) for file in model.files]
    for name in projector.made:
        frames = [_whole(model, frame) for frame in FRAMES]
        files.append(MadeTensors(model.path, {name: torch.stack(frames, 2)}))
    return files


def _whole(model: GgufModel, name: str) -> Tensor:
    """Return a tensor of a file as it is stored, with floats.

    Raises:
        ModelLoadError: it is missing, or quantized.
    """
    if name not in model.tensors or model.tensors[name][1].type.name not in _FLOATS:
        raise ModelLoadError(f"{model.path}: tensor {name!r} is missing, or not of floats")
    file, entry = model.tensors[name]
    stored = GgufTensorFile(file, {})
    return stored.part(stored.tensors[name], tuple(slice(0, size) for size in entry.shape)).clone()


def _listed_parameters(model: GgufModel, listed: Listed) -> MadeTensors:
    """Return the layer parameters in a model's metadata, with a number per layer.

    Raises:
        ModelLoadError: a list is missing or not of finite numbers.
    """
    numbers: dict[str, Tensor] = {}
    for key, (name, shape) in listed.items():
        group, _, last = key.rpartition(".")
        for layer, number in enumerate(model.about(group).numbers(last)):
            numbers[f"model.layers.{layer}.{name}"] = torch.tensor(number).expand(shape)
    return MadeTensors(model.path, numbers)


def _in_model(entry: TensorEntry, places: TensorPlaces) -> Iterator[GgufTensor]:
    """Yield the model tensors of one file tensor; members of a stack are adjacent."""
    place = place_of(entry.name, places)
    if not place.apart or len(entry.shape) < 3:
        yield _at(place, entry)
        return
    count, size = entry.shape[0], (entry.end - entry.start) // entry.shape[0]
    for number in range(count):
        start = entry.start + number * size
        part = replace(entry, shape=entry.shape[1:], start=start, end=start + size)
        yield _at(place.member(number), part)


def _at(place: TensorPlace, entry: TensorEntry) -> GgufTensor:
    shape = list(entry.shape)
    if entry.type.is_quantized:
        shape[-1] = entry.row_bytes
    if place.flat:
        shape = [math.prod(shape)]
    if place.new_axis is not None:
        shape.insert(place.new_axis, 1)
    if place.rows:
        shape = [math.prod(shape[:-1]), shape[-1]]
    dtype = _FLOATS.get(entry.type.name, torch.uint8)
    return GgufTensor(place.name, dtype, tuple(shape), entry.start, entry.end, entry, place.made_by)


def _shape_of(tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape in numbers."""
    return (*tensor.shape[:-1], tensor.entry.shape[-1])
