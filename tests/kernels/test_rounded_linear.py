# SPDX-License-Identifier: Apache-2.0
"""Products of integers that a checkpoint rounds activations to: exact, and the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import ops, reference, reference_quantized
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import PackedWeight, RowQuantization, WeightScheme
from tests.fixtures.folded import folded

WAYS = {
    "token": RowQuantization("int8"),
    "static": RowQuantization("int8", scale=0.04),
    "token, shifted": RowQuantization("int8", symmetric=False),
    "static, shifted": RowQuantization("int8", scale=0.04, zero=-9.0, symmetric=False),
}


def int8_weight(outputs: int, inputs: int, numbers: Tensor | None = None) -> PackedWeight:
    """Integers of 8 bits with scales that no sum depends on."""
    weight = torch.randn(outputs, inputs) if numbers is None else numbers
    return ops.pack_weight(weight, WeightScheme("int8", fast=False)).with_code_sums()


def exact(x: Tensor, weight: PackedWeight, way: RowQuantization) -> tuple[Tensor, Tensor]:
    """In float64: the product, and what the magnitudes of its terms come to."""
    seen, kept = reference_quantized.round_rows(x, way).double(), reference.unpack_weight(weight).double()
    return seen @ kept.t(), seen.abs() @ kept.abs().t()


@pytest.mark.parametrize("way", WAYS)
def test_products_are_nearer_than_float32_sums_would_be(way: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 1000) * torch.logspace(-2, 2, 9)[:, None], int8_weight(50, 1000)
    want, terms = exact(x, weight, WAYS[way])
    got = ops.rounded_linear(x, weight, rounding=WAYS[way])
    assert ((got.double() - want).abs() <= 4e-7 * terms).all()


def steps_of(x: Tensor, way: RowQuantization) -> tuple[Tensor, Tensor]:
    """Scales and zero points [T, 1]."""
    if way.scale is not None:
        return torch.full((len(x), 1), way.scale), torch.full((len(x), 1), way.zero)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    if way.symmetric:
        return torch.maximum(high, -low) / 127.5, torch.zeros(len(x), 1)
    scales = (high - low) / 255
    return scales, (-128 - low / scales).clamp(-128, 127).round()


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 8, 16), (3, 50, 77), (40, 130, 1000), (205, 34, 640)]
)
def test_sums_have_the_bits_of_integers(
    way: str, rows: int, outputs: int, inputs: int, restore_threads: None
) -> None:
    """They are scaled, and a bias is added, in float32; with any instruction set, on any threads."""
    torch.manual_seed(2)
    x, weight, bias = torch.randn(rows, inputs), int8_weight(outputs, inputs), torch.randn(outputs)
    scales, zeros = steps_of(x, WAYS[way])
    codes = (x / scales + zeros).clamp(-128, 127).round() - zeros
    kept = reference.unpack_weight(weight).double()
    of_outputs = kept.abs().amax(1) / 127
    sums = codes.long() @ (kept / of_outputs[:, None]).round().long().t()
    want = sums.float() * scales * of_outputs.float() + bias
    for threads in (1, 2, 3):
        set_num_threads(threads)
        assert torch.equal(ops.rounded_linear(x, weight, rounding=WAYS[way], bias=bias), want)


@folded("zero", [0.0, -128.0, 127.0])
@folded("sign", [1.0, -1.0])
def test_no_sum_of_the_largest_integers_overflows(sign: float, zero: float) -> None:
    inputs = 640
    weight = int8_weight(16, inputs, torch.full((16, inputs), sign))
    x = torch.tensor([[-300.0], [300.0]]).expand(2, inputs).contiguous()
    got = ops.rounded_linear(x, weight, rounding=RowQuantization("int8", scale=1.0, zero=zero))
    want = sign * (torch.tensor([[-128.0], [127.0]]) - zero) * inputs
    torch.testing.assert_close(got, want.expand(2, 16), rtol=1e-6, atol=0.0)


def test_without_sums_of_its_integers_a_matrix_is_widened() -> None:
    weight = ops.pack_weight(torch.randn(50, 200), WeightScheme("int8"))
    x, way = torch.randn(3, 200), WAYS["static, shifted"]
    want, terms = exact(x, weight, way)
    assert ((ops.rounded_linear(x, weight, rounding=way).double() - want).abs() <= 1e-6 * terms).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_in_every_batch(way: str) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(40, 300), int8_weight(70, 300), torch.randn(70)
    together = ops.rounded_linear(x, weight, rounding=WAYS[way], bias=bias)
    for rows in (slice(3, 4), slice(10, 23), slice(0, 40)):
        alone = ops.rounded_linear(x[rows], weight, rounding=WAYS[way], bias=bias)
        assert torch.equal(alone, together[rows])


def test_non_finite_input_makes_its_row_nan() -> None:
    x = torch.randn(3, 128)
    x[1, 70] = torch.nan
    for way in WAYS.values():
        out = ops.rounded_linear(x, int8_weight(8, 128), rounding=way)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()
