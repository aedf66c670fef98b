# SPDX-License-Identifier: Apache-2.0
"""4-bit integers with scales and minimums that are integers themselves, times a step that 256 values share.

The layout is llama.cpp's Q4_K, with factors of 8 bits instead of 6. A group's scale and minimum are the line through
its codes with the least squared error, found alternately: codes of a line, then the line of these codes. Errors of
large weights count more, as in llama.cpp without an importance matrix: large inputs tend to meet large weights.

Invariant: `csrc/cpu/linear_pack.cpp` makes the same choice, to the last bit: sums are in one order.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import BLOCK, BlockScales, Numbers, finite_or_nan, from_stream
from quire.kernels.formats.search import ordered_sum
from quire.kernels.linear import PackedWeight

PARTS = (1.0, 1.125, 0.875, 0.75)
"""Multiples of a group's range that the first codes are tried to span: above 1 for weights that were rounded before,
in larger groups."""
_TURNS = 3
_MOST_CODE = 15
_MOST_FACTOR = 127
LEAST_STEP = 2.0**-22  # Smallest step of scales that float16 holds well enough, to 2^-3 of itself.
_STEP_INPUTS = 8
"""Values of k in a step of the data of panels."""


class Lines(NamedTuple):
    """Scale and minimum of groups, float32 [..., G]: a weight is scale * code - minimum."""

    scales: Tensor
    minimums: Tensor

    def codes(self, groups: Tensor) -> Tensor:
        """Return the codes of [..., G, group] in float32; 0 where there is no scale to divide by."""
        usable = (self.scales > 0).unsqueeze(-1)
        codes = ((groups + self.minimums.unsqueeze(-1)) * (1 / self.scales).unsqueeze(-1)).round()
        return torch.where(usable, codes.clamp(0, _MOST_CODE), 0.0)

    def chosen(self, others: "Lines", where: Tensor) -> "Lines":
        """Return the others where `where` is true."""
        return Lines(*(torch.where(where, new, old) for new, old in zip(others, self, strict=True)))


class _Sums(NamedTuple):
    """Weighted sums over the codes and values of groups, [..., G]; `total` is that of the weights."""

    total: Tensor
    error: Tensor
    codes: Tensor
    squares: Tensor
    values: Tensor
    products: Tensor

    def minimums(self, scales: Tensor) -> Tensor:
        """Return the minimums with the least error for these codes at such scales; 0 for a group of zeros."""
        return torch.where(self.total == 0, 0.0, (scales * self.codes - self.values) / self.total)

    def refitted(self, line: Lines) -> Lines:
        """Return the least-squares lines for the codes; groups without a slope keep the scales of `line`."""
        spread = self.total * self.squares - self.codes * self.codes
        scales = (self.total * self.products - self.codes * self.values) / spread
        scales = torch.where((spread > 0) & (scales > 0), scales, line.scales)
        return Lines(scales, self.minimums(scales))


def two_level(rows: Tensor, group: int) -> Numbers:
    """Return [N, K] of any float dtype as codes uint8 [N, K], with scales and minimums in blocks.

    If float16 does not hold the step of a block, all scales and minimums are float32, and those of such blocks are not
    multiples of a step. Other blocks have the same numbers either way, so a part of a matrix has those of the whole.
    """
    count = -(-rows.shape[1] // BLOCK)
    padded = F.pad(rows.float(), (0, count * BLOCK - rows.shape[1]))
    groups = padded.view(len(rows), count, BLOCK // group, group)
    lines = best_lines(groups)
    scales, factors, steps = _leveled(lines.scales)
    kept = Lines(scales, lines.minimums)
    minimums, offsets, offset_steps = _leveled(_sums(groups, weights_of(groups), kept).minimums(scales))
    codes = Lines(scales, minimums).codes(groups)
    misfits = _misfits(groups, steps, offset_steps)
    if not misfits.any():
        coded = codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]]
        return Numbers(coded, BlockScales(factors, steps), BlockScales(offsets, offset_steps))
    exact, exact_codes = _unleveled(groups)
    codes = torch.where(misfits[..., None, None], exact_codes, codes)
    wide = exact.chosen(Lines(scales, minimums), ~misfits.unsqueeze(-1))
    num_groups = -(-rows.shape[1] // group)
    return Numbers(
        codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]],
        *(part.flatten(1)[:, :num_groups].contiguous() for part in wide),
    )


def narrowed(weight: PackedWeight, inputs: slice) -> PackedWeight:
    """Return the weight of some inputs, whole chunks and groups, of a weight in panels.

    Scales and minimums become float32, with the same values, since inputs may split a block.
    """
    group = weight.scheme.group_size
    groups = slice(inputs.start // group, -(-inputs.stop // group))
    scales, zeros = (
        from_stream(part, group)[..., groups].transpose(1, 2).contiguous()
        for part in (weight.scales, weight.zeros)
        if part is not None
    )
    data = weight.data[:, inputs.start // _STEP_INPUTS : -(-inputs.stop // _STEP_INPUTS)].contiguous()
    return replace(weight, data=data, scales=scales, zeros=zeros, inputs=inputs.stop - inputs.start)


def best_lines(groups: Tensor) -> Lines:
    """Return for float32 [..., G, group] the line of each group with the least error, the first of equals."""
    low, high, weights = groups.amin(-1), groups.amax(-1), weights_of(groups)
    best, least = Lines(torch.zeros_like(low), -low), torch.full_like(low, torch.inf)
    for part in PARTS:
        scales = (high - low) / _MOST_CODE * part
        line = Lines(scales, scales * (_MOST_CODE / 2) - (low + high) * 0.5)
        for turn in range(_TURNS + 1):
            sums = _sums(groups, weights, line)
            better = (line.scales > 0) & (sums.error < least)
            best, least = best.chosen(line, better), torch.where(better, sums.error, least)
            if turn < _TURNS:
                line = sums.refitted(line)
    finite = (high - low).isfinite() & groups.isfinite().all(-1)
    return Lines(torch.where(finite, best.scales, torch.nan), torch.where(finite, best.minimums, 0.0))


def weights_of(groups: Tensor) -> Tensor:
    """Return the weights of squared errors of [..., G, group]: magnitude plus mean magnitude of the group."""
    magnitudes = groups.abs()
    return magnitudes + (ordered_sum(magnitudes) / groups.shape[-1]).unsqueeze(-1)


def _sums(groups: Tensor, weights: Tensor, line: Lines) -> _Sums:
    codes = line.codes(groups)
    stands_for = codes * line.scales.unsqueeze(-1) - line.minimums.unsqueeze(-1)
    squares = (stands_for - groups).square()
    summed = (squares, codes, codes * codes, groups, codes * groups)
    return _Sums(ordered_sum(weights), *(ordered_sum(each * weights) for each in summed))


def _misfits(groups: Tensor, steps: Tensor, offset_steps: Tensor) -> Tensor:
    """Return [N, B] true for blocks whose steps float16 does not hold."""
    varies = (groups.amax(-1) > groups.amin(-1)).any(-1)
    return (varies & (steps < LEAST_STEP)) | ~steps.isfinite() | ~offset_steps.isfinite()


def _unleveled(groups: Tensor) -> tuple[Lines, Tensor]:
    """Return the best lines of groups, and their codes, for any magnitude that float32 has."""
    exponents = torch.frexp(groups.abs().amax(-1)).exponent.clamp(-126, 126)
    usual = torch.ldexp(groups, -exponents.unsqueeze(-1))
    lines = best_lines(usual)
    return Lines(*(torch.ldexp(part, exponents) for part in lines)), lines.codes(usual)


def _leveled(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [N, B, G] as multiples of a step of each block: their values, int8 factors [N, B * G], steps [N, B]."""
    steps = finite_or_nan((numbers.abs().amax(-1) / _MOST_FACTOR).half())
    wide = steps.float().unsqueeze(-1)
    factors = torch.where(wide > 0, (numbers / wide).round().clamp(-_MOST_FACTOR, _MOST_FACTOR), 0.0)
    return factors * wide, factors.to(torch.int8).flatten(1), steps
