# SPDX-License-Identifier: Apache-2.0
"""Search for scales of few-bit integers by the squared error of the dequantized weights.

Invariant: `csrc/cpu/linear_pack.cpp` makes the same choice, to the last bit: errors are summed in one order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import finite_or_nan, steps_of, usable

FACTORS = (1.0, *(i / 16 for i in range(18, 10, -1) if i != 16))
"""Multiples of a group's range that codes are tried to span: clipping costs its extremes and spares the rest."""

_LANES = 8
"""Parallel partial sums of errors, as in csrc/cpu/vec.h."""


class Steps(NamedTuple):
    """Scales [N, G] and zero points, float32 [N, G], of groups: a weight is scale * (code - zero)."""

    scales: Tensor
    zeros: Tensor

    def codes(self, groups: Tensor, bits: int) -> Tensor:
        """Return the codes of [N, G, group] in float32; 0 where there is no scale to divide by."""
        scales, zeros = self.scales.float().unsqueeze(-1), self.zeros.unsqueeze(-1)
        codes = (steps_of(groups, scales) + zeros).clamp(0, (1 << bits) - 1)
        return torch.where(usable(scales), codes, 0.0)

    def weights(self, codes: Tensor) -> Tensor:
        """Return the dequantized values of codes [N, G, group]."""
        return (codes - self.zeros.unsqueeze(-1)) * self.scales.float().unsqueeze(-1)

    def chosen(self, others: "Steps", where: Tensor) -> "Steps":
        """Return the others where `where` is true."""
        return Steps(*(torch.where(where, new, old) for new, old in zip(others, self, strict=True)))


def best_steps(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype = torch.bfloat16,
    importance: Tensor | None = None,
) -> Steps:
    """Return for float32 [N, G, group] the steps of `FACTORS` with the least squared error, the first of equals.

    `dtype` is the dtype of scales. `importance`, broadcast to the groups, weights the squares.
    """
    candidates = _candidates(groups, bits, symmetric, dtype)
    best = next(candidates)
    least = _error(groups, best, bits, importance)
    for steps in candidates:
        error = _error(groups, steps, bits, importance)
        better = error < least
        best, least = best.chosen(steps, better), torch.where(better, error, least)
    return best


def extent(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each group and 0."""
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def _candidates(groups: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Iterator[Steps]:
    low, high = extent(groups)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    widest = torch.where(high >= -low, high, low) / -middle if symmetric else (high - low) / most
    for factor in FACTORS:
        scales = finite_or_nan(widest * factor).to(dtype)
        zeros = torch.full_like(low, middle)
        if not symmetric:
            zeros = steps_of(-low * factor, scales.float()).clamp(0, most)
        yield Steps(scales, zeros)


def _error(groups: Tensor, steps: Steps, bits: int, importance: Tensor | None) -> Tensor:
    """Return the error [N, G]; infinite where there is no scale to divide by."""
    scales, zeros = steps.scales.float().unsqueeze(-1), steps.zeros.unsqueeze(-1)
    integers = (groups * (1 / scales)).round()
    squares = (torch.clamp(integers, -zeros, (1 << bits) - 1 - zeros) * scales - groups).square()
    total = ordered_sum(squares if importance is None else squares * importance)
    return torch.where(usable(steps.scales), total, torch.inf)


def ordered_sum(values: Tensor) -> Tensor:
    """Return the sum over the last dimension, in the order of `sum` in csrc/cpu/vec.h."""
    lanes = torch.unflatten(F.pad(values, (0, -values.shape[-1] % _LANES)), -1, (-1, _LANES))
    total = torch.zeros_like(lanes[..., 0, :])
    for step in lanes.unbind(-2):
        total = total + step
    for half in (4, 2, 1):
        total = total[..., :half] + total[..., half : 2 * half]
    return total[..., 0]
