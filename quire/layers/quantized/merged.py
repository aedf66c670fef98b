# SPDX-License-Identifier: Apache-2.0
"""Packed weight of several modules in different formats: integers of 6 or 8 bits hold the numbers of many formats.

Invariant: nothing is rounded. A module's codes become their integer values, and groups become as small as the smallest,
with scales repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats import BlockScales, Numbers, format_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Coded, scheme_of

_SIX_BITS = ("int6", "int4")
_EIGHT_BITS = (*_SIX_BITS, "int8", "iq4_nl")
"""Formats whose codes have integer values of so many bits."""

Place = Callable[[Tensor, Tensor], None]
"""Copy of a module's rows to their place in the whole weight."""


def merged_scheme(schemes: Collection[WeightScheme | None]) -> WeightScheme | None:
    """Return the scheme that holds the numbers of all schemes; None if there is none, or a module has none."""
    first, *others = set(schemes)
    if first is None or not others:
        return first
    each = [scheme for scheme in schemes if scheme is not None and scheme.kind in _EIGHT_BITS]
    groups = {scheme.group_size for scheme in each}
    if len(each) < len(schemes) or (0 in groups and len(groups) > 1):
        return None
    kind = "int6" if all(scheme.kind in _SIX_BITS for scheme in each) else "int8"
    return scheme_of(kind, math.gcd(*groups), shifted=not all(scheme.symmetric for scheme in each))


def merged_numbers(num_rows: int, modules: Sequence[tuple[Place, Coded]], scheme: WeightScheme) -> Numbers:
    """Return the numbers of a weight with `num_rows` rows from the numbers of its modules."""
    held, middle = [_held(coded, scheme) for _, coded in modules], _integral(scheme).zero(scheme)

    def merged(parts: Sequence[Tensor]) -> Tensor:
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        whole = torch.empty(num_rows, parts[0].shape[1], dtype=dtype, device=parts[0].device)
        for (place, _), part in zip(modules, parts, strict=True):
            place(part, whole)
        return whole

    def streams(parts: Sequence[Any]) -> Any:
        if parts[0] is None:
            return None
        if all(isinstance(part, BlockScales) for part in parts):
            return BlockScales(*(merged(each) for each in zip(*parts, strict=True)))
        return merged([part.float() if isinstance(part, BlockScales) else part for part in parts])

    data, scales, zeros = zip(*held, strict=True)
    return Numbers(merged(data), streams(scales), streams(_all_shifted(scales, zeros, middle)))


def _held(coded: Coded, scheme: WeightScheme) -> Numbers:
    """Return the same weight in a scheme of `merged_scheme`, without zeros if it has none."""
    own, numbers = coded.scheme, coded.numbers
    if (own.kind, own.group_size, own.symmetric) == (scheme.kind, scheme.group_size, scheme.symmetric):
        return numbers
    kept = _integral(own)
    integers = kept.values(kept.codes(numbers.data), own).to(torch.int8)
    times = own.group_size // scheme.group_size if scheme.group_size else 1
    count = -(-integers.shape[1] // scheme.group_size) if scheme.group_size else 1
    scales, zeros = (_repeated(each, times, count) for each in (numbers.scales, numbers.zeros))
    if isinstance(zeros, Tensor) and zeros.dtype is torch.uint8:
        zeros = zeros + (_integral(scheme).zero(scheme) - kept.zero(own))
    return Numbers(integers, scales, zeros)


def _integral(scheme: WeightScheme) -> GroupedFormat:
    kept = format_of(scheme)
    assert isinstance(kept, GroupedFormat), "one of integers"
    return kept


def _repeated(stream: Tensor | BlockScales | None, times: int, count: int) -> Tensor | BlockScales | None:
    """Repeat each group's number for the smaller groups in it, `count` in total."""
    if stream is None:
        return None
    if isinstance(stream, BlockScales):
        return BlockScales(stream.factors.repeat_interleave(times, 1), stream.steps)
    return stream.repeat_interleave(times, 1)[:, :count]


def _all_shifted(
    scales: Sequence[Tensor | BlockScales], zeros: Sequence[Tensor | BlockScales | None], middle: int
) -> Sequence[Tensor | BlockScales | None]:
    """Return zeros for all modules where some have them; added ones are neutral: `middle` is the code of value 0."""
    if all(each is None for each in zeros):
        return zeros
    points = any(isinstance(each, Tensor) and each.dtype is torch.uint8 for each in zeros)
    neutral = [_no_points(each, middle) if points else _no_minimums(each) for each in scales]
    return [other if each is None else each for each, other in zip(zeros, neutral, strict=True)]


def _no_points(scales: Tensor | BlockScales, middle: int) -> Tensor:
    groups = scales.factors if isinstance(scales, BlockScales) else scales
    return torch.full_like(groups, middle, dtype=torch.uint8)


def _no_minimums(scales: Tensor | BlockScales) -> Tensor | BlockScales:
    if isinstance(scales, BlockScales):
        return BlockScales(*map(torch.zeros_like, scales))
    return torch.zeros_like(scales)
