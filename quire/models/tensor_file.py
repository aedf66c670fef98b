"""What the loader asks of a file with tensors, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire.layers.slot import Box


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are byte positions in the file."""

    name: str
    dtype: torch.dtype
    """Of what is read."""
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile(Protocol):
    """A checked file; `tensors` holds what is in it by the names that models have for it, in the order of the data."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """None of them reaches outside the file."""

    def in_floats(self, info: TensorInfo) -> TensorInfo:
        """The same tensor as floats, if the file has it in another form and knows what that stands for."""

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        """A part of a tensor, in the memory of the file if it is there in such numbers."""

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        """Fill memory, uint8, with the elements of a part, past the map; several threads may do so at once."""

    def release(self, info: TensorInfo) -> None:
        """Let the system have the memory of a tensor back; if it is read again, it is read from the file."""
