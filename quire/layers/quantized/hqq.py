"""HQQ (H. Badri and A. Shaji, "Half-quadratic quantization", 2023) as its package writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quantized.codec import Codec, Coded, Stored, every


@dataclass(frozen=True)
class Hqq(Codec):
    """Integers of all of the matrix in a row, `group_size` of which share a scale and a zero point, which is a float.

    Laid out [G, group_size], or [group_size, G] with `axis` 0, they are cut into as many parts, by their first
    dimension, as a word holds integers, the first part in the highest bits: W_q uint8, or int32 of ten of 3 bits. scale
    and zero, of each group; shape, that of the matrix.
    """

    bits: int = 4
    group_size: int = 64
    axis: int = 1
    cuts = False

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        count = num_outputs * num_inputs // self.group_size
        rows, columns = (count, self.group_size) if self.axis == 1 else (self.group_size, count)
        words = every(-(-rows // self._per_word)), every(columns)
        return {
            "W_q": Stored(words, (torch.int32 if self.bits == 3 else torch.uint8,)),
            "scale": Stored((every(count),), flat=True),
            "zero": Stored((every(count),), flat=True),
            "shape": Stored((every(2),), (torch.int64,)),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        words, scales = tensors["W_q"], tensors["scale"]
        shifts = range(self.bits * (self._per_word - 1), -1, -self.bits)
        numbers = torch.cat([(words >> shift) & ((1 << self.bits) - 1) for shift in shifts])
        if self.axis == 0:
            numbers = numbers[: self.group_size].t()
        values = (numbers[: len(scales)] - tensors["zero"].unsqueeze(1)) * scales.unsqueeze(1)
        rows, columns = tensors["shape"].tolist()
        if rows * columns != values.numel() or min(rows, columns) < 1:
            raise ValueError(f"shape says [{rows}, {columns}], and W_q has {values.numel()} numbers")
        return (values if self.axis == 1 else values.t()).reshape(rows, columns)

    @property
    def _per_word(self) -> int:
        return 10 if self.bits == 3 else 8 // self.bits
