# SPDX-License-Identifier: Apache-2.0
"""Packed formats made straight from the numbers of a checkpoint: exactly those, in both layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.cpu import library
from quire.kernels.formats import BlockScales, Numbers, format_of, grouped
from quire.kernels.formats.books import BookFormat
from quire.kernels.linear import WeightScheme
from tests.fixtures.folded import folded

OUTPUTS, INPUTS = 40, 512
BOOKS = ("e2m1", "iq4_nl", "nf4", "fp4")
KINDS = ("int8", "int6", "int4", "fp8", *BOOKS)
GROUPS = (0, 16, 32, 64, 128, 256)
SCALES = (torch.float32, torch.bfloat16, torch.float16, None)
"""Types of scales; None: blocks."""
SHIFTS = (None, torch.uint8, torch.float32)
"""Of zero points, or minimums, which have the type of the scales."""


def random_numbers(kind: str, group: int, scales: torch.dtype | None, shift: torch.dtype | None) -> Numbers:
    """Return random quantized values of a weight [40, 512]."""
    generator = torch.Generator().manual_seed(group)
    groups = INPUTS // (group or INPUTS)

    def stream() -> Tensor | BlockScales:
        if scales is not None:
            return torch.rand(OUTPUTS, groups, generator=generator).to(scales)
        factors = torch.randint(-32, 64, (OUTPUTS, groups), generator=generator, dtype=torch.int8)
        return BlockScales(factors, torch.rand(OUTPUTS, INPUTS // 256, generator=generator).half() / 32)

    most = {"int8": 256, "fp8": 256, "int6": 64}.get(kind, 16)
    data = torch.randint(0, most, (OUTPUTS, INPUTS), generator=generator, dtype=torch.uint8)
    if kind in ("int8", "int6") and shift is not torch.uint8:
        data = (data - most // 2).view(torch.int8)
    if kind == "fp8":
        data[data & 127 == 127] = 0  # NaN
        data = data.view(torch.float8_e4m3fn)
    if shift is torch.uint8:
        zeros = torch.randint(0, most + 1, (OUTPUTS, groups), generator=generator).clamp(max=255).to(shift)
        return Numbers(data, stream(), zeros)
    return Numbers(data, stream(), None if shift is None else stream())


def wide(of: Tensor | BlockScales, group: int) -> Tensor:
    """[N, G] -> float32 [N, K]."""
    return of.float().repeat_interleave(group or INPUTS, 1)


def stands_for(kind: str, group: int, numbers: Numbers) -> Tensor:
    """The matrix, by the formula of checkpoints."""
    data, scales, zeros = numbers
    assert scales is not None
    kept = format_of(WeightScheme(kind))
    scale, values = (
        wide(scales, group),
        kept.book[data.int()] if isinstance(kept, BookFormat) else data.float(),
    )
    if zeros is None:
        return scale * (values - 8 if kind == "int4" else values)
    if isinstance(zeros, Tensor) and zeros.dtype is torch.uint8:
        return scale * (values - wide(zeros, group))
    return scale * values - wide(zeros, group)


def forms(kind: str, group: int) -> list[tuple[WeightScheme, Numbers]]:
    """Every way of scaling and shifting that there is in groups of so many."""
    return [
        (WeightScheme(kind, group, shift is None), random_numbers(kind, group, scales, shift))
        for scales, shift in product(SCALES, SHIFTS if kind in ("int8", "int6", "int4") else (None,))
        if scales is not None or group
    ]


every_kind = folded(("kind", "group"), [*product(KINDS, GROUPS)])


@every_kind
def test_a_matrix_stands_for_the_numbers_that_it_was_made_of(kind: str, group: int) -> None:
    for scheme, numbers in forms(kind, group):
        expected = stands_for(kind, group, numbers)
        for halves in (1, 2):
            panels = format_of(scheme).from_numbers(numbers, scheme, halves)
            format_of(scheme).check("test", panels)
            assert torch.equal(reference.unpack_weight(panels), expected)
        rows = format_of(scheme).from_numbers(numbers, scheme, layout="rows")
        assert torch.equal(reference.unpack_weight(rows), expected)


def test_a_word_has_a_code_of_each_plane() -> None:
    codes = torch.randint(0, 16, (3, 2 * grouped.WORD_INPUTS), dtype=torch.uint8)
    packed = grouped.to_words(codes)
    assert torch.equal(grouped.from_words(packed), codes)
    planes = codes.view(3, 2, grouped.PLANES, grouped.WORDS)
    for plane in range(grouped.PLANES):
        shifted = packed.view(3, 2, grouped.WORDS) >> (plane // 2 * 4 + plane % 2 * 16) & 15
        assert torch.equal(shifted.to(torch.uint8), planes[:, :, plane])


@every_kind
@pytest.mark.skipif(library.loaded() is None, reason="the C++ kernels were not built")
def test_format_matmul_matches_the_oracle_by_row_in_any_batch(kind: str, group: int) -> None:
    x = torch.randn(23, INPUTS, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, 39, 7, 16])
    for form, numbers in forms(kind, group):
        for fast in (True, False):
            scheme = replace(form, fast=fast)
            weight = format_of(scheme).from_numbers(numbers, scheme, 2)
            alone = torch.cat([ops.packed_linear(row, weight) for row in x.split(1)])
            expected = reference.packed_linear(x, weight)
            torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
            for rows in (2, 7, 12, 13, 23):
                assert torch.equal(ops.packed_linear(x[:rows], weight), alone[:rows]), (scheme, rows)
            assert torch.equal(ops.packed_embedding(ids, weight), reference.packed_embedding(ids, weight))


@folded("group", GROUPS[1:])
@pytest.mark.skipif(library.loaded() is None, reason="the C++ kernels were not built")
def test_int6_matmul_equals_that_of_int8_numbers(group: int) -> None:
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(1))
    for form, numbers in forms("int6", group):
        if numbers.data.dtype is torch.uint8:
            continue
        wide = replace(form, kind="int8")
        six, eight = (format_of(each).from_numbers(numbers, each) for each in (form, wide))
        assert torch.equal(ops.packed_linear(x, six), ops.packed_linear(x, eight))
        assert six.data.nbytes * 4 == eight.data.nbytes * 3


@folded(
    ("scheme", "changed", "message"),
    [
        (WeightScheme("int8", 48), {}, "group_size must be one of 0, 16, 32"),
        (WeightScheme("int8", 32), {"data": torch.zeros(40, 512)}, "numbers must be int8"),
        (WeightScheme("int4", 32), {}, "numbers must be uint8 in 0..15"),
        (WeightScheme("int8", 32, False), {}, "zeros must be given; symmetric is False"),
        (WeightScheme("int8", 32), {"scales": None}, "scales must be given"),
        (WeightScheme("int8", 32), {"zeros": torch.zeros(40, 16)}, "zeros must not be given"),
        (WeightScheme("int8", 32), {"scales": torch.ones(40, 8)}, r"must be \[40, 16\]; they are \[40, 8\]"),
        (
            WeightScheme("int8", 32),
            {"scales": BlockScales(torch.zeros(40, 16, dtype=torch.int8), torch.zeros(40, 3).half())},
            r"must be int8 with float16 steps; .* steps \[40, 3\]",
        ),
    ],
)
def test_numbers_that_are_none_of_the_scheme_are_refused(
    scheme: WeightScheme, changed: dict[str, Tensor], message: str
) -> None:
    numbers = random_numbers("int8", 32, torch.float32, None)._replace(**changed)
    with pytest.raises((TypeError, ValueError), match=message):
        format_of(scheme).from_numbers(numbers, scheme)
