# SPDX-License-Identifier: Apache-2.0
"""HQQ (H. Badri and A. Shaji, "Half-quadratic quantization", 2023) as its package writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import INT8_ZERO, WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Stored, every, scheme_of
from quire.layers.quantized.integers import kind_of


@dataclass(frozen=True)
class Hqq(Codec):
    """Integers of the flattened matrix; `group_size` of them share a scale and a zero point, which is a float.

    Laid out as [G, group_size], or [group_size, G] with `axis` 0, they are split along the first dimension into as many
    parts as a word holds integers. The first part is in the highest bits: W_q is uint8, or int32 of ten 3-bit integers.
    scale and zero are per group; shape is the matrix's.
    """

    bits: int = 4
    group_size: int = 64
    axis: int = 1
    cuts = False

    @property
    def input_unit(self) -> int:
        return self.group_size

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        in_rows = self.axis == 1 and num_inputs % self.group_size == 0
        return scheme_of(kind_of(self.bits), self.group_size, shifted=True) if in_rows else None

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
        numbers = (numbers[: self.group_size].t() if self.axis == 0 else numbers[: len(scales)]).to(
            torch.uint8
        )
        rows, columns = tensors["shape"].tolist()
        if rows * columns != numbers.numel() or min(rows, columns) < 1:
            raise ValueError(f"shape says [{rows}, {columns}], and W_q has {numbers.numel()} numbers")
        middle = INT8_ZERO if self.bits > 4 else 0
        minimums = (tensors["zero"].float() - middle) * scales.float()
        if self.axis == 1 and columns % self.group_size == 0:
            return Coded.of(
                kind_of(self.bits),
                self.group_size,
                numbers.reshape(rows, columns),
                scales.view(rows, -1),
                minimums.view(rows, -1),
            )
        values = (numbers - tensors["zero"].unsqueeze(1)) * scales.unsqueeze(1)
        return (values if self.axis == 1 else values.t()).reshape(rows, columns)

    @property
    def _per_word(self) -> int:
        return 10 if self.bits == 3 else 8 // self.bits
