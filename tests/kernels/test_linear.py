# SPDX-License-Identifier: Apache-2.0
"""Packed linears: every weight format at every number of rows, with the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import FLOAT, SPAN, PackedWeight, WeightScheme, num_panels
from tests.fixtures.folded import folded
from tests.kernels.op_cases import FUNCTIONS, INTEGERS, SCHEMES

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import linear as binding

ROWS = (0, 1, 2, 3, 5, 6, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130, 193, 400)
SHAPES = ((33, 45), (16, 896), (50, 1031), (1, 1))
FORMATS = [
    *((FLOAT, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((scheme, torch.bfloat16) for scheme in SCHEMES[1:]),
]
every_format = folded(("scheme", "dtype"), FORMATS, ids=str)


def random_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * 10007 + inputs)
    return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)


def random_rows(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs))


@every_format
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_any_number_of_rows_matches_the_oracle_and_rows_alone(
    scheme: WeightScheme, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = binding.pack_weight(random_weight(outputs, inputs, dtype), scheme)
    x, bias = random_rows(max(ROWS), inputs), torch.linspace(-1, 1, outputs)
    alone = torch.cat([binding.packed_linear(row, weight, bias) for row in x.split(1)])
    torch.testing.assert_close(alone, reference.packed_linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    for rows in ROWS:
        assert torch.equal(binding.packed_linear(x[:rows], weight, bias), alone[:rows]), rows


@every_format
def test_threads_do_not_change_a_bit(scheme: WeightScheme, dtype: torch.dtype, restore_threads: None) -> None:
    weight = binding.pack_weight(random_weight(1000, 320, dtype), scheme)
    for rows in (1, 4, 40):
        x = random_rows(rows, 320)
        results = []
        for threads in (1, 2, 3):
            set_num_threads(threads)
            results.append(binding.packed_linear(x, weight))
        assert all(torch.equal(result, results[0]) for result in results), rows


@every_format
@pytest.mark.parametrize("half", [16, 19, 64])
def test_the_fused_activation_is_the_op_of_its_own(
    scheme: WeightScheme, dtype: torch.dtype, half: int
) -> None:
    weight = binding.pack_weight(random_weight(2 * half, 77, dtype), scheme, 2)
    for rows in (1, 3, 20, 200):
        x, bias = random_rows(rows, 77), torch.linspace(-1, 1, 2 * half)
        apart = ops.silu_and_mul(binding.packed_linear(x, weight, bias))
        assert torch.equal(binding.packed_linear(x, weight, bias, "silu_and_mul"), apart), rows


@every_format
def test_a_product_that_ends_in_an_activation_is_both_ops(scheme: WeightScheme, dtype: torch.dtype) -> None:
    weight, bias = binding.pack_weight(random_weight(83, 77, dtype), scheme), torch.linspace(-1, 1, 83)
    bias[5], bias[81] = torch.nan, -torch.inf
    for rows in (1, 3, 40, 200):
        x = 3 * random_rows(rows, 77)
        sums = binding.packed_linear(x, weight, bias)
        for function in FUNCTIONS:
            got, want = binding.packed_linear(x, weight, bias, function), ops.activate(sums, function)
            # The sign of what is no number is the compiler's choice.
            ours, theirs = (one.masked_fill(one.isnan(), torch.nan).view(torch.int32) for one in (got, want))
            assert torch.equal(ours, theirs), (function, rows)


@every_format
@pytest.mark.parametrize("halves", [1, 2])
def test_packing_equals_the_oracle_s(scheme: WeightScheme, dtype: torch.dtype, halves: int) -> None:
    rows = random_weight(70, 301, dtype)
    rows[3], rows[5, 40:80] = 0, 0
    ours, theirs = binding.pack_weight(rows, scheme, halves), reference.pack_weight(rows, scheme, halves)
    assert torch.equal(ours.data, theirs.data)
    for part in ("scales", "zeros"):
        a, b = getattr(ours, part), getattr(theirs, part)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if scheme.kind == "float":
        assert torch.equal(reference.unpack_weight(ours), rows)


def of_magnitudes(least: int, most: int, seed: int = 0) -> Tensor:
    """Return [40, 256] in groups of 16 that are up to a power of ten each, some 0, in some rows all alike."""
    generator = torch.Generator().manual_seed(seed)
    powers = 10.0 ** torch.randint(least, most + 1, (40, 16, 1), generator=generator, dtype=torch.float64)
    powers[::3] = powers[::3, :1]
    powers[1::7, 2:4] = 0
    uniform = 2 * torch.rand(40, 16, 16, generator=generator, dtype=torch.float64) - 1
    return (powers * uniform).float().flatten(1)


MAGNITUDES = [(-38, 38), (-38, -30), (-9, -2), (-8, -8), (5, 9), (38, 38)]


@folded("scheme", INTEGERS, ids=str)
@folded(("least", "most"), MAGNITUDES)
def test_rounding_keeps_groups_of_any_magnitude(scheme: WeightScheme, least: int, most: int) -> None:
    for seed in range(2):
        rows = of_magnitudes(least, most, seed)
        packed, expected = binding.pack_weight(rows, scheme, 2), reference.pack_weight(rows, scheme, 2)
        for ours, theirs in zip(packed.tensors().values(), expected.tensors().values(), strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours, theirs)
        error = (reference.unpack_weight(packed) - rows).double().abs()
        # Groups of two-level scales whose magnitudes differ by orders share a step: the bound is that of their block.
        extent_inputs = 256 if scheme.two_level else scheme.group_size or 256
        groups = torch.unflatten(rows.double(), 1, (-1, extent_inputs))
        extent = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
        if scheme.symmetric:
            extent = groups.abs().amax(-1)
        slack = 1 / 3 if scheme.kind == "int4" else 1 / 127
        assert (error.view_as(groups).amax(-1) <= slack * extent).all()


@folded("scheme", [s for s in INTEGERS if s.group_size], ids=str)
@folded(("least", "most"), MAGNITUDES)
def test_parts_of_a_matrix_have_the_numbers_of_the_whole(scheme: WeightScheme, least: int, most: int) -> None:
    rows = of_magnitudes(least, most)
    whole = reference.unpack_weight(binding.pack_weight(rows, scheme))
    halves = () if scheme.two_level else ((slice(None), slice(0, 128)), (slice(None), slice(128, 256)))
    for part in (*halves, (slice(5, 6), slice(None))):
        assert torch.equal(reference.unpack_weight(binding.pack_weight(rows[part], scheme)), whole[part])


def test_scales_of_a_group_take_float32_only_where_they_must() -> None:
    scheme, usual = WeightScheme("int8", 32), random_weight(40, 256)
    for value, dtype in (
        (1e-3, torch.float16),
        (8.3e6, torch.float16),
        (9e-4, torch.float32),
        (8.4e6, torch.float32),
    ):
        rows = usual.clone()
        rows[7, 32:64] = value
        scales = binding.pack_weight(rows, scheme).scales
        assert scales is not None
        assert scales.dtype is dtype, value


@folded("scheme", INTEGERS, ids=str)
def test_rounding_moves_a_weight_by_half_a_step_at_most(scheme: WeightScheme) -> None:
    rows = random_weight(40, 256)
    error = (reference.unpack_weight(binding.pack_weight(rows, scheme)) - rows).abs()
    groups = rows.unflatten(1, (-1, scheme.group_size or 256))
    symmetric, shifted = (127, 255) if scheme.kind == "int8" else (8, 15)
    extent = groups.abs().amax(-1) / symmetric
    if not scheme.symmetric:
        extent = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / shifted
    # int4 may clip a third of the range.
    slack = 3.0 if scheme.kind == "int4" else 0.501
    assert (error.unflatten(1, (groups.shape[1], -1)).amax(-1) <= slack * extent).all()
    assert error.norm() < {"int8": 0.01, "int4": 0.105}[scheme.kind] * rows.norm()


@folded("scheme", [s for s in INTEGERS if s.kind == "int4" and not s.two_level], ids=str)
def test_no_group_of_int4_is_worse_than_over_its_whole_range(scheme: WeightScheme) -> None:
    rows = random_weight(40, 256).pow(3)  # outliers are what is worth clipping
    groups = rows.unflatten(1, (-1, scheme.group_size or 256))
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    if scheme.symmetric:
        steps, zeros = torch.where(high >= -low, high, low) / -8, torch.tensor(8.0)
        steps = steps.bfloat16().float()
    else:
        steps = ((high - low) / 15).bfloat16().float()
        zeros = (-low / steps).round().clamp(0, 15)
    plain = ((groups / steps).round() + zeros).clamp(0, 15).sub(zeros) * steps
    packed = reference.unpack_weight(binding.pack_weight(rows, scheme)).view_as(groups)
    error, of_range = ((each - groups).square().sum(-1) for each in (packed, plain))
    assert (error <= of_range * 1.0001).all()
    assert error.sum() < 0.99 * of_range.sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_exact_in_int4_are_unchanged(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (24, 4, 32), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scales = (torch.rand(24, 4, 1, generator=generator) + 0.5).bfloat16().float()
    rows = ((codes - 8) * scales).flatten(1)
    packed = binding.pack_weight(rows, WeightScheme("int4", 32, symmetric))
    torch.testing.assert_close(reference.unpack_weight(packed), rows, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_8_bit_activations_err_no_more_than_8_bit_weights(kind: str) -> None:
    rows, x = random_weight(64, 4864), random_rows(20, 4864)
    group = 32 if kind == "int4" else 0
    exact = x.double() @ rows.double().T
    fast, precise, eight_bits = (
        binding.packed_linear(x, binding.pack_weight(rows, scheme))
        for scheme in (
            WeightScheme(kind, group),
            WeightScheme(kind, group, fast=False),
            WeightScheme("int8", fast=False),
        )
    )
    assert 0 < (fast - precise).norm() < (eight_bits - exact).norm()


@folded("inputs", [64, 128, 150])
@folded("num_rows", [1, 40])
@folded("scheme", [s for s in INTEGERS if s.kind == "int8" and s.group_size], ids=str)
def test_large_activation_coarsens_its_own_32_values_only(
    scheme: WeightScheme, num_rows: int, inputs: int
) -> None:
    rows, x = random_weight(40, inputs), random_rows(num_rows, inputs)
    large = torch.arange(inputs) % SPAN == 0
    large[SPAN : 2 * SPAN] = False
    x[:, large] = 1e4
    rows[:, (torch.arange(inputs) < SPAN) | (torch.arange(inputs) >= 2 * SPAN)] = 0.0
    out = binding.packed_linear(x, binding.pack_weight(rows, scheme))
    exact = x @ rows.T
    assert (out - exact).norm() < 0.02 * exact.norm()


@folded("scheme", SCHEMES, ids=str)
@folded("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_affects_exactly_its_row(scheme: WeightScheme, bad: float) -> None:
    rows, x = random_weight(20, 64), random_rows(9, 64)
    weight = binding.pack_weight(rows, scheme)
    clean = binding.packed_linear(x, weight)
    x[4, 3] = bad
    out = binding.packed_linear(x, weight)
    assert not out[4].isfinite().any()
    assert torch.equal(out[[0, 8]], clean[[0, 8]])
    rows[7, 5] = bad
    spoilt = binding.packed_linear(x[:1], binding.pack_weight(rows, scheme))
    assert torch.equal(spoilt.isfinite(), torch.arange(20)[None] != 7)


@folded("scheme", INTEGERS, ids=str)
def test_the_largest_integers_do_not_overflow(scheme: WeightScheme) -> None:
    weight = binding.pack_weight(torch.full((16, 2048), 127.0), scheme)
    together, apart = torch.ones(7, 2048), torch.tensor([1.0, 0.0]).repeat(7, 1024)
    for x in (together, apart, -together, -apart):
        expected = reference.packed_linear(x, weight)
        torch.testing.assert_close(binding.packed_linear(x, weight), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (FLOAT, 16),
        (WeightScheme("int8"), 8.1),
        (WeightScheme("int4", 32), 4.5),
        (WeightScheme("int4", 128, False), 4.2),
        (WeightScheme("int4", 32, False, two_level=True), 4.625),
    ],
)
def test_a_packed_weight_takes_its_bits_and_no_more(scheme: WeightScheme, bits: float) -> None:
    weight = binding.pack_weight(random_weight(512, 1024, torch.bfloat16), scheme)
    assert 8 * weight.nbytes / (512 * 1024) <= bits


@every_format
def test_rows_of_a_packed_table(scheme: WeightScheme, dtype: torch.dtype) -> None:
    weight = binding.pack_weight(random_weight(35, 45, dtype), scheme)
    ids = torch.tensor([0, 34, 7, 16, 7])
    assert torch.equal(binding.packed_embedding(ids, weight), reference.unpack_weight(weight).float()[ids])
    for outside in (-1, 35):
        with pytest.raises(IndexError, match="1 ids are outside the table of 35 rows"):
            binding.packed_embedding(torch.tensor([3, outside]), weight)


def test_activations_may_be_of_any_float_type_and_shape() -> None:
    weight = binding.pack_weight(random_weight(20, 16), FLOAT)
    x = random_rows(12, 16)
    for dtype in (torch.bfloat16, torch.float16):
        out = binding.packed_linear(x.to(dtype).view(3, 4, 16), weight)
        assert (out.dtype, out.shape) == (dtype, (3, 4, 20))
    assert torch.equal(
        binding.packed_linear(x.t().contiguous().t(), weight), binding.packed_linear(x, weight)
    )


def packed(**changed: object) -> PackedWeight:
    parts = {
        "scheme": FLOAT,
        "data": torch.zeros(num_panels(20, 1), 8, 16),
        "scales": None,
        "zeros": None,
        "outputs": 20,
        "inputs": 8,
    }
    return PackedWeight(**(parts | changed))  # type: ignore[arg-type]


@folded(
    ("changed", "message"),
    [
        ({"outputs": 40}, r"a float weight \[40, 8\] holds \[\[2, 8, 16\]\]"),
        ({"inputs": 9}, "holds"),
        ({"halves": 2, "outputs": 21}, "holds"),
        ({"data": torch.zeros(2, 16, 8).transpose(1, 2)}, "must be contiguous and on the CPU"),
        ({"scheme": WeightScheme("int8")}, "a int8 weight"),
        ({"scheme": WeightScheme("int4", 48)}, "group_size must be one of"),
        ({"data": torch.zeros(2, 8, 16, dtype=torch.float64)}, "float64"),
    ],
)
def test_weight_with_a_wrong_scheme_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        binding.packed_linear(torch.ones(2, 8), packed(**changed))


def test_wrong_arguments_are_clear_errors() -> None:
    good = packed()
    with pytest.raises(ValueError, match=r"x must have 8 columns; it is float32 \[2, 9\]"):
        binding.packed_linear(torch.ones(2, 9), good)
    with pytest.raises(ValueError, match=r"bias must be contiguous float32 \[20\]"):
        binding.packed_linear(torch.ones(2, 8), good, torch.ones(19))
    with pytest.raises(ValueError, match="activation 'silu_and_mul' with a weight in 1 parts"):
        binding.packed_linear(torch.ones(2, 8), good, None, "silu_and_mul")
    with pytest.raises(ValueError, match="weight must be"):
        binding.pack_weight(torch.ones(3, 4), FLOAT, 2)
