# SPDX-License-Identifier: Apache-2.0
"""Packed weight of several modules in different formats: 8-bit integers hold the numbers of many formats.

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
from quire.kernels.linear import INT8_ZERO, WeightScheme
from quire.layers.quantized.codec import Coded, scheme_of

_INTEGRAL = ("int8", "int4", "iq4_nl")
"""Formats whose codes have 8-bit integer values."""

Place = Callable[[Tensor, Tensor], None]
"""Copy of a module's rows to their place in the whole weight."""


def merged_scheme(schemes: Collection[WeightScheme | None]) -> WeightScheme | None:
    """Return the scheme that holds the numbers of all schemes; None if there is none, or a module has none."""
    first, *others = set(schemes)
    if first is None or not others:
        return first
    each = [scheme for scheme in schemes if scheme is not None and scheme.kind in _INTEGRAL]
    groups = {scheme.group_size for scheme in each}
    if len(each) < len(schemes) or (0 in groups and len(groups) > 1):
        return None
    return scheme_of("int8", math.gcd(*groups), shifted=not all(scheme.symmetric for scheme in each))


def merged_numbers(num_rows: int, modules: Sequence[tuple[Place, Coded]], scheme: WeightScheme) -> Numbers:
    """Return the numbers of a weight with `num_rows` rows from the numbers of its modules."""
    held = [_held(coded, scheme) for _, coded in modules]

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
    return Numbers(merged(data), streams(scales), streams(_all_shifted(scales, zeros)))


def _held(coded: Coded, scheme: WeightScheme) -> Numbers:
    """Return the same weight in a scheme of `merged_scheme`, without zeros if it has none."""
    own, numbers = coded.scheme, coded.numbers
    if (own.kind, own.group_size, own.symmetric) == (scheme.kind, scheme.group_size, scheme.symmetric):
        return numbers
    kept = format_of(own)
    assert isinstance(kept, GroupedFormat), "one of integers"
    integers = kept.values(kept.codes(numbers.data), own).to(torch.int8)
    times = own.group_size // scheme.group_size if scheme.group_size else 1
    count = -(-integers.shape[1] // scheme.group_size) if scheme.group_size else 1
    scales, zeros = (_repeated(each, times, count) for each in (numbers.scales, numbers.zeros))
    if isinstance(zeros, Tensor) and zeros.dtype is torch.uint8:
        zeros = zeros + (INT8_ZERO - kept.zero(own))
    return Numbers(integers, scales, zeros)


def _repeated(stream: Tensor | BlockScales | None, times: int, count: int) -> Tensor | BlockScales | None:
    """Repeat each group's number for the smaller groups in it, `count` in total."""
    if stream is None:
        return None
    if isinstance(stream, BlockScales):
        return BlockScales(stream.factors.repeat_interleave(times, 1), stream.steps)
    return stream.repeat_interleave(times, 1)[:, :count]


def _all_shifted(
    scales: Sequence[Tensor | BlockScales], zeros: Sequence[Tensor | BlockScales | None]
) -> Sequence[Tensor | BlockScales | None]:
    """Return zeros for all modules where some have them; added ones are neutral."""
    if all(each is None for each in zeros):
        return zeros
    points = any(isinstance(each, Tensor) and each.dtype is torch.uint8 for each in zeros)
    neutral = [_no_points(each) if points else _no_minimums(each) for each in scales]
    return [other if each is None else each for each, other in zip(zeros, neutral, strict=True)]


def _no_points(scales: Tensor | BlockScales) -> Tensor:
    groups = scales.factors if isinstance(scales, BlockScales) else scales
    return torch.full_like(groups, INT8_ZERO, dtype=torch.uint8)


def _no_minimums(scales: Tensor | BlockScales) -> Tensor | BlockScales:
    if isinstance(scales, BlockScales):
        return BlockScales(*map(torch.zeros_like, scales))
    return torch.zeros_like(scales)
