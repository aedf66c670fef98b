"""Integers of 8 and of 4 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import Numbers, finite_or_nan, steps_of, usable
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import INT8_ZERO, WeightScheme

INT4_ZERO = 8


class Int8Format(GroupedFormat):
    """Integers of 8 bits: int8 as they are, or uint8, whose value is 128 less.

    uint8 go with zero points: a weight is s * (c - z).
    """

    kind = "int8"
    together = 2
    per_byte = 1
    can_shift = True

    def code(self, dtype: torch.dtype) -> int:
        return 3

    def zero(self, scheme: WeightScheme) -> int:
        return INT8_ZERO

    def codes(self, data: Tensor) -> Tensor:
        if data.dtype not in (torch.int8, torch.uint8):
            raise TypeError(f"int8: numbers must be int8, or uint8 with zero points; they are {data.dtype}")
        return data if data.dtype is torch.uint8 else data.view(torch.uint8) ^ INT8_ZERO

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        return codes.float() - INT8_ZERO

    def in_rows(self, codes: Tensor) -> Tensor:
        return (codes ^ INT8_ZERO).view(torch.int8)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        groups = in_groups(rows, scheme)
        if scheme.symmetric:
            scales = finite_or_nan(groups.abs().amax(-1) / 127)
            q = steps_of(groups, scales.unsqueeze(-1)).clamp(-127, 127).to(torch.int8)
            return Numbers(q.flatten(1)[:, : rows.shape[1]], scales)
        low, high = _range(groups)
        scales = finite_or_nan((high - low) / 255)
        return _shifted(rows, groups, low, scales, 255)


class Int4Format(GroupedFormat):
    """Integers of 4 bits without sign: symmetric, a weight is s * (c - 8)."""

    kind = "int4"
    per_byte = 2
    can_shift = True
    scale_dtype = torch.bfloat16

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
        groups = in_groups(rows, scheme)
        low, high = _range(groups)
        if not scheme.symmetric:
            return _shifted(rows, groups, low, finite_or_nan((high - low) / 15).bfloat16(), 15)
        scales = finite_or_nan(torch.where(high >= -low, high, low) / -8).bfloat16()
        return _coded(rows, groups, torch.full_like(low, INT4_ZERO), scales, 15)


def in_groups(rows: Tensor, scheme: WeightScheme) -> Tensor:
    """[N, K] -> float32 [N, G, group], padded with 0 to whole groups."""
    group = scheme.group_size or rows.shape[1]
    return torch.unflatten(F.pad(rows.float(), (0, -rows.shape[1] % group)), 1, (-1, group))


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each group and 0."""
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def _shifted(rows: Tensor, groups: Tensor, low: Tensor, scales: Tensor, most: int) -> Numbers:
    """Codes 0..most with zero points, in steps of scales."""
    zeros = steps_of(-low, scales.float()).clamp(0, most)
    coded = _coded(rows, groups, zeros, scales, most)
    return coded._replace(zeros=zeros.to(torch.uint8))


def _coded(rows: Tensor, groups: Tensor, zeros: Tensor, scales: Tensor, most: int) -> Numbers:
    """Codes 0..most of values in steps of scales from zeros; 0 where a scale is none."""
    q = (steps_of(groups, scales.float().unsqueeze(-1)) + zeros.unsqueeze(-1)).clamp(0, most)
    codes = torch.where(usable(scales).unsqueeze(-1), q, 0.0).to(torch.uint8)
    return Numbers(codes.flatten(1)[:, : rows.shape[1]], scales)
