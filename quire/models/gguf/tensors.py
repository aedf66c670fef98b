"""The tensors of a GGUF file for the loader: under the names of our modules, and in floats.

Invariant: a row of a tensor is whole blocks, so what is read of it is what is asked for, but for the rest of the blocks
at both ends. Numbers are float32 as ggml's reference has them, or the file's own floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.layers.slot import Box
from quire.models.gguf.config import architecture_of
from quire.models.gguf.dequantize import dequantize, float_dtype
from quire.models.gguf.file import GgufFile, TensorEntry
from quire.models.gguf.model import GgufModel
from quire.models.gguf.tensor_names import Places, place_of
from quire.models.tensor_file import TensorFile, TensorInfo


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """A tensor under its name in the model."""

    entry: TensorEntry


class GgufTensorFile:
    """See `TensorFile`; `places` are those of the architecture."""

    def __init__(self, file: GgufFile, places: Places) -> None:
        self.path: Path = file.path
        self._file = file
        tensors = [_in_model(entry, places) for entry in file.tensors.values()]
        self.tensors: Mapping[str, GgufTensor] = {tensor.name: tensor for tensor in tensors}

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        assert isinstance(info, GgufTensor), "one of `tensors`"
        kind, dtype = info.entry.type, float_dtype(info.entry.type)
        raw = torch.frombuffer(
            self._file.map, dtype=torch.uint8, count=info.end - info.start, offset=info.start
        )
        if dtype is not None:
            return raw.view(dtype).view(info.shape)[box]
        *rows, columns = box
        first, last = columns.start // kind.size, -(-columns.stop // kind.size)
        blocks = raw.view(*info.shape[:-1], -1)[(*rows, slice(first * kind.num_bytes, last * kind.num_bytes))]
        skipped = first * kind.size
        return dequantize(kind, blocks)[..., columns.start - skipped : columns.stop - skipped]

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        memory.copy_(self.part(info, box).contiguous().view(-1).view(torch.uint8))

    def release(self, info: TensorInfo) -> None:
        assert isinstance(info, GgufTensor), "one of `tensors`"
        self._file.release(info.entry)


def gguf_tensor_files(path: Path) -> list[TensorFile]:
    """The files of a model in GGUF.

    Raises:
        ModelLoadError: as `GgufModel`.
        UnsupportedModelError: quire does not know the architecture.
    """
    model = GgufModel(path)
    return [GgufTensorFile(file, architecture_of(model).places) for file in model.files]


def _in_model(entry: TensorEntry, places: Places) -> GgufTensor:
    place, shape = place_of(entry.name, places), list(entry.shape)
    if place.new_axis is not None:
        shape.insert(place.new_axis, 1)
    dtype = float_dtype(entry.type) or torch.float32
    return GgufTensor(place.name, dtype, tuple(shape), entry.start, entry.end, entry)
