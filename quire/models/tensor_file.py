# SPDX-License-Identifier: Apache-2.0
"""Interface of a file with tensors, whatever its format."""

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
    """Dtype as read."""
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile(Protocol):
    """Checked file; `tensors` has its tensors by the model's names for them, in the order of the data."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name; none reaches outside the file."""

    def in_floats(self, info: TensorInfo) -> TensorInfo:
        """Return the tensor's info as floats, if the file stores it encoded and can decode it."""

    def part(self, info: TensorInfo, box: Box) -> Tensor:
        """Return a part of a tensor, without a copy if the file stores this form."""

    def read_part_into(self, info: TensorInfo, box: Box, memory: Tensor) -> None:
        """Fill uint8 memory with a part's elements, bypassing the map; thread-safe."""

    def release(self, info: TensorInfo) -> None:
        """Release the tensor's mapped memory; it is read again from the file if needed."""
