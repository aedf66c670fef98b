# SPDX-License-Identifier: Apache-2.0
"""Integer formats of 8, 6 and 4 bits."""

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import Numbers, finite_or_nan, steps_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.formats.search import Steps, best_steps, extent
from quire.kernels.formats.two_level import two_level
from quire.kernels.linear import INT8_ZERO, PANEL, QUAD, Layout, PackedWeight, WeightScheme

INT4_ZERO = 8
_PANELS_TOGETHER = 4
_LEAST_FLOAT16, _MOST_FLOAT16 = 2.0**-17, 65520.0
"""Float16 holds scales from the first up to, but without, the second to 2^-8 of themselves or better."""


class SignedFormat(GroupedFormat):
    """Integers around 0: int8 as given, or uint8 codes with values c - `middle`.

    uint8 codes may have zero points: a weight is s * (c - z).
    """

    together = 0
    per_byte = 1
    can_shift = True
    middle: ClassVar[int]

    def zero(self, scheme: WeightScheme) -> int:
        return self.middle

    def codes(self, data: Tensor) -> Tensor:
        if data.dtype not in (torch.int8, torch.uint8):
            raise TypeError(
                f"{self.kind}: numbers must be int8, or uint8 with zero points; they are {data.dtype}"
            )
        return data if data.dtype is torch.uint8 else data.view(torch.uint8) + self.middle

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        return codes.float() - self.middle

    def in_rows(self, codes: Tensor) -> Tensor:
        return (codes - self.middle).view(torch.int8)


class Int8Format(SignedFormat):
    """8-bit integers."""

    kind = "int8"
    middle = INT8_ZERO

    def code(self, dtype: torch.dtype) -> int:
        return 3

    def scale_dtype(self, scheme: WeightScheme) -> torch.dtype:
        return torch.float16 if scheme.symmetric and scheme.group_size else torch.float32

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        groups = in_groups(rows, scheme)
        if scheme.symmetric:
            scales = finite_or_nan(groups.abs().amax(-1) / 127)
            if self.scale_dtype(scheme) is torch.float16:
                scales = in_float16(scales)
            q = steps_of(groups, scales.float().unsqueeze(-1)).clamp(-127, 127).to(torch.int8)
            return Numbers(q.flatten(1)[:, : rows.shape[1]], scales)
        low, high = extent(groups)
        scales = finite_or_nan((high - low) / 255)
        zeros = steps_of(-low, scales).clamp(0, 255)
        return _coded(rows, groups, Steps(scales, zeros), 8, scheme)


class Int6Format(SignedFormat):
    """6-bit integers, -32 to 31; in rows they are int8.

    In panels a step holds the codes of 16 k, in four quads: bytes with the low bits of two quads, bytes with those of
    the other two, and bytes with the two high bits of each quad, the first lowest.
    """

    kind = "int6"
    middle = 32

    def code(self, dtype: torch.dtype) -> int:
        return 10

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        groups = in_groups(rows, scheme)
        return _coded(rows, groups, best_steps(groups, 6, scheme.symmetric), 6, scheme)

    def from_numbers(
        self, numbers: Numbers, scheme: WeightScheme, halves: int = 1, layout: Layout = "panels"
    ) -> PackedWeight:
        if layout == "panels":
            return super().from_numbers(numbers, scheme, halves, layout)
        data, scales, zeros = numbers
        if isinstance(zeros, Tensor) and zeros.dtype is torch.uint8:
            zeros = zeros + (INT8_ZERO - self.middle)
        eight, wide = Int8Format(), replace(scheme, kind="int8")
        return eight.from_numbers(
            Numbers(self.in_rows(self.codes(data)), scales, zeros), wide, halves, layout
        )

    def step_shape(self, padded: int) -> tuple[int, ...]:
        return padded // (4 * QUAD), 3, PANEL, QUAD

    def to_steps(self, codes: Tensor) -> Tensor:
        words = torch.unflatten(codes.contiguous().view(torch.int32), 2, (-1, 4))  # a quad in each
        steps = words.new_empty(len(words), words.shape[2], 3, PANEL)
        for first in range(0, len(words), _PANELS_TOGETHER):  # what lies between stays in the cache
            some = slice(first, first + _PANELS_TOGETHER)
            quads, out = words[some], steps[some]
            low, high = (quads & 0x0F0F0F0F).unbind(3), (quads >> 4 & 0x03030303).unbind(3)
            out[:, :, 0] = (low[0] | low[1] << 4).transpose(1, 2)
            out[:, :, 1] = (low[2] | low[3] << 4).transpose(1, 2)
            out[:, :, 2] = (high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6).transpose(1, 2)
        return torch.unflatten(steps.view(torch.uint8), 3, (PANEL, QUAD))

    def from_steps(self, panels: Tensor) -> Tensor:
        first, second, high = panels.permute(0, 3, 1, 2, 4).unbind(3)  # [P, 16, steps, 4]
        low = (first & 15, first >> 4, second & 15, second >> 4)
        return torch.stack([quad | (high >> 2 * i & 3) << 4 for i, quad in enumerate(low)], 3).flatten(2)


class Int4Format(GroupedFormat):
    """Unsigned 4-bit integers; if symmetric, a weight is s * (c - 8)."""

    kind = "int4"
    per_byte = 2
    can_shift = True

    def scale_dtype(self, scheme: WeightScheme) -> torch.dtype:
        return torch.bfloat16

    def streams(self, scheme: WeightScheme) -> tuple[torch.dtype, ...]:
        return (torch.int8, torch.int8) if scheme.two_level else super().streams(scheme)

    def code(self, dtype: torch.dtype) -> int:
        return 4

    def zero(self, scheme: WeightScheme) -> int:
        return INT4_ZERO if scheme.symmetric else 0

    def codes(self, data: Tensor) -> Tensor:
        if data.dtype is not torch.uint8:
            raise TypeError(f"int4: numbers must be uint8 in 0..15; they are {data.dtype}")
        return data

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        return codes.float() - self.zero(scheme)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        if scheme.two_level:
            return two_level(rows, scheme.group_size)
        groups = in_groups(rows, scheme)
        return _coded(rows, groups, best_steps(groups, 4, scheme.symmetric), 4, scheme)


def in_float16(scales: Tensor) -> Tensor:
    """Round float32 scales to float16; if some do not fit, those stay unchanged, and all are float32.

    A scale that fits is the same number in either dtype, so a shard of a weight has the numbers of the whole.
    """
    if scales.is_meta:
        return scales.half()
    misfits = ((scales > 0) & (scales < _LEAST_FLOAT16)) | (scales >= _MOST_FLOAT16)
    halves = scales.half()
    return torch.where(misfits, scales, halves.float()) if misfits.any() else halves


def in_groups(rows: Tensor, scheme: WeightScheme) -> Tensor:
    """Return [N, K] as float32 [N, G, group], padded with 0 to whole groups."""
    group = scheme.group_size or rows.shape[1]
    return torch.unflatten(F.pad(rows.float(), (0, -rows.shape[1] % group)), 1, (-1, group))


def _coded(rows: Tensor, groups: Tensor, steps: Steps, bits: int, scheme: WeightScheme) -> Numbers:
    codes = steps.codes(groups, bits).to(torch.uint8).flatten(1)[:, : rows.shape[1]]
    return Numbers(codes, steps.scales, None if scheme.symmetric else steps.zeros.to(torch.uint8))
