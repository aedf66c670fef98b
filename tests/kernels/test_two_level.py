# SPDX-License-Identifier: Apache-2.0
"""int4 with scales and minimums in two levels: what it holds, what it costs, and parts of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.formats import BlockScales, format_of
from quire.kernels.formats.two_level import PARTS, Lines, best_lines, narrowed, two_level, weights_of
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.reference import pack_weight, unpack_weight
from tests.fixtures.folded import folded


def scheme_of(group: int) -> WeightScheme:
    return WeightScheme("int4", group, symmetric=False, two_level=True)


def rows_of(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / 50


def relative_error(packed: PackedWeight, rows: Tensor) -> float:
    return float((unpack_weight(packed) - rows).norm() / rows.norm())


@pytest.mark.parametrize(("group", "bits"), [(16, 5.125), (32, 4.625), (64, 4.375), (128, 4.25)])
def test_two_level_weights_keep_their_bits_err_less_than_plain(group: int, bits: float) -> None:
    rows = rows_of(32, 768)
    packed = pack_weight(rows, scheme_of(group))
    assert 8 * packed.nbytes / rows.numel() == bits
    plain = pack_weight(rows, WeightScheme("int4", max(group, 32), symmetric=False))
    assert relative_error(packed, rows) < 0.98 * relative_error(plain, rows)


@folded("inputs", [1, 60, 256, 300, 576])
@folded("group", [16, 32, 128])
def test_two_level_weights_are_the_same_in_panels_and_in_rows(inputs: int, group: int) -> None:
    rows, scheme = rows_of(20, inputs), scheme_of(group)
    in_panels, in_rows = (format_of(scheme).pack(rows, scheme, 1, layout) for layout in ("panels", "rows"))
    format_of(scheme).check("test", in_panels)
    assert torch.equal(unpack_weight(in_panels), unpack_weight(in_rows))
    assert relative_error(in_panels, rows) < 0.12


def test_weights_on_lines_of_sixteen_codes_are_nearly_kept() -> None:
    """As in Q4_1; of the two levels an error of 1/254 of the largest scale of a block remains."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (8, 16, 32), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scales, minimums = torch.rand(2, 8, 16, 1, generator=generator) + 0.5
    rows = (codes * scales - 8 * minimums).flatten(1)
    assert relative_error(pack_weight(rows, scheme_of(32)), rows) < 0.01


def test_no_line_is_worse_than_those_it_began_with() -> None:
    groups = rows_of(64, 256).view(64, 8, 32).pow(3)
    weights, low, high = weights_of(groups), groups.amin(-1), groups.amax(-1)

    def error(lines: Lines) -> Tensor:
        stands_for = lines.codes(groups) * lines.scales.unsqueeze(-1) - lines.minimums.unsqueeze(-1)
        return ((stands_for - groups).square() * weights).sum(-1)

    best = error(best_lines(groups))
    for part in PARTS:
        scales = (high - low) / 15 * part
        assert (best <= error(Lines(scales, scales * 7.5 - (low + high) / 2)) * 1.0001).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_spoil_their_block_alone(bad: float) -> None:
    rows = rows_of(4, 512)
    clean = unpack_weight(pack_weight(rows, scheme_of(32)))
    rows[1, 300] = bad
    found = unpack_weight(pack_weight(rows, scheme_of(32)))
    assert found[1, 288:320].isnan().all()
    found[1, 256:] = clean[1, 256:]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_constant_weights_are_kept(value: float) -> None:
    rows = torch.full((2, 256), value)
    torch.testing.assert_close(unpack_weight(pack_weight(rows, scheme_of(32))), rows, rtol=1e-3, atol=0)


@pytest.mark.parametrize("inputs", [slice(0, 64), slice(64, 192), slice(128, 576), slice(256, 320)])
def test_parts_of_two_level_weights_equal_the_whole(inputs: slice) -> None:
    packed = pack_weight(rows_of(20, 576), scheme_of(32))
    part = narrowed(packed, inputs)
    format_of(part.scheme).check("test", part)
    assert torch.equal(unpack_weight(part), unpack_weight(packed)[:, inputs])


def test_two_level_numbers_match_their_blocks() -> None:
    numbers = two_level(rows_of(3, 300), 32)
    assert numbers.data.shape == (3, 300)
    assert isinstance(numbers.scales, BlockScales)
    assert (numbers.scales.factors.shape, numbers.scales.steps.shape) == ((3, 16), (3, 2))
