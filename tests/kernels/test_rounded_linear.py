"""Products of integers that a checkpoint rounds activations to: exact, and the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.rounding import RowRounding

WAYS = {"token": RowRounding("int8"), "static": RowRounding("int8", scale=0.04)}


def int8_weight(outputs: int, inputs: int, numbers: Tensor | None = None) -> PackedWeight:
    """Integers of 8 bits with scales that no sum depends on."""
    weight = torch.randn(outputs, inputs) if numbers is None else numbers
    return ops.pack_weight(weight, WeightScheme("int8", fast=False))


def exact(x: Tensor, weight: PackedWeight, way: RowRounding) -> tuple[Tensor, Tensor]:
    """In float64: the product, and what the magnitudes of its terms come to."""
    seen, kept = reference.round_rows(x, way).double(), reference.unpack_weight(weight).double()
    return seen @ kept.t(), seen.abs() @ kept.abs().t()


@pytest.mark.parametrize("way", WAYS)
def test_products_are_nearer_than_float32_sums_would_be(way: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 1000) * torch.logspace(-2, 2, 9)[:, None], int8_weight(50, 1000)
    want, terms = exact(x, weight, WAYS[way])
    got = ops.rounded_linear(x, weight, rounding=WAYS[way])
    assert ((got.double() - want).abs() <= 4e-7 * terms).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_sum_of_the_largest_integers_overflows(sign: float) -> None:
    inputs = 640
    weight = int8_weight(16, inputs, torch.full((16, inputs), sign))
    x = torch.tensor([[-200.0], [200.0]]).expand(2, inputs).contiguous()
    got = ops.rounded_linear(x, weight, rounding=RowRounding("int8", scale=1.0))
    want = sign * torch.tensor([[-128.0], [127.0]]) * inputs
    torch.testing.assert_close(got, want.expand(2, 16), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_in_every_batch(way: str) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(40, 300), int8_weight(70, 300), torch.randn(70)
    together = ops.rounded_linear(x, weight, rounding=WAYS[way], bias=bias)
    for rows in (slice(3, 4), slice(10, 23), slice(0, 40)):
        alone = ops.rounded_linear(x[rows], weight, rounding=WAYS[way], bias=bias)
        assert torch.equal(alone, together[rows])


def test_what_is_not_finite_makes_its_row_so() -> None:
    x = torch.randn(3, 128)
    x[1, 70] = torch.nan
    for way in WAYS.values():
        out = ops.rounded_linear(x, int8_weight(8, 128), rounding=way)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()
