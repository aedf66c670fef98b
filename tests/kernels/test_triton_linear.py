# SPDX-License-Identifier: Apache-2.0
"""The GPU's linears, dense and packed, in Triton's interpreter: against the oracle, and themselves in other batches.

float32 and float16 only: the interpreter's `tl.dot` on bfloat16 is wrong.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
import triton
import triton.language as tl

from quire.errors import ConfigError
from quire.kernels import ops, reference
from quire.kernels.formats import Numbers, format_of
from quire.kernels.formats.grouped import to_words
from quire.kernels.linear import Function, PackedWeight, QuantizedRows, WeightScheme
from quire.kernels.triton import codes, elementwise, linear, matmul, quantize
from quire.kernels.triton import primitives as parts_of_k
from tests.kernels.op_cases import FUNCTIONS, randn

DTYPES = [torch.float32, torch.float16]
"""What the interpreter gets right."""
INTEGERS = [WeightScheme("int8"), *(WeightScheme("int4", g, s) for g in (32, 128) for s in (True, False))]
CODES = [
    *(WeightScheme("int8", group, symmetric) for group, symmetric in ((32, True), (16, False), (0, False))),
    *(WeightScheme("int4", group, symmetric) for group, symmetric in ((16, True), (0, False))),
    *(WeightScheme(kind, group) for kind, group in (("e2m1", 16), ("iq4_nl", 32), ("nf4", 0), ("fp8", 128))),
    WeightScheme("fp8", fast=False),
]
"""What is multiplied as the floats that codes stand for."""
FP8 = [WeightScheme("fp8", per_tensor=per_tensor) for per_tensor in (False, True)]
FLOAT = WeightScheme(invariant=True)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3}


def matrix(outputs: int, inputs: int) -> Tensor:
    return randn(outputs, inputs) * inputs**-0.5


def stands_for(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """The matrix that a packed one stands for, by the oracle."""
    return reference.unpack_weight(reference.pack_weight(weight, scheme))


@pytest.mark.more
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [(scheme, torch.float16) for scheme in (*INTEGERS, *CODES)]
    + [(scheme, torch.float32) for scheme in (*INTEGERS[::2], *CODES[::4])],
    ids=str,
)
def test_integer_linear(scheme: WeightScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = TOLERANCES[dtype]
    for outputs, inputs in [(34, 45), (66, 600)]:
        weight = matrix(outputs, inputs)
        packed, rounded = linear.pack_weight(weight, scheme), stands_for(weight, scheme)
        assert torch.equal(reference.unpack_weight(packed), rounded)
        for rows in (0, 1, 70):
            x, bias = randn(rows, inputs, dtype=dtype), randn(outputs)
            want = reference.linear(x.float(), rounded, bias)
            got = linear.packed_linear(x, packed, bias).float()
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            gated = linear.packed_linear(x, packed, bias, "silu_and_mul").float()
            torch.testing.assert_close(
                gated, reference.silu_and_mul(want), rtol=4 * tolerance, atol=4 * tolerance
            )


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scheme", [*INTEGERS[:2], CODES[0]], ids=str)
def test_a_matrix_in_one_part_or_in_several(
    scheme: WeightScheme, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_k, "MAX_PARTS", parts)
    torch.manual_seed(0)
    weight, x, bias = matrix(40, 700), randn(3, 2, 700), randn(40)
    packed = linear.pack_weight(weight, scheme)
    tile = linear.tile_of(packed, 6, x.dtype)
    assert parts_of_k.split_k(-(-40 // tile.outputs), -(-700 // tile.k))[0] == parts
    want = reference.linear(x, stands_for(weight, scheme), bias)
    torch.testing.assert_close(linear.packed_linear(x, packed, bias), want, rtol=1e-4, atol=1e-4)


def test_counts_of_parts_stay_behind_when_a_weight_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an engine sleeps: they are the kernels', and not memory of the weight."""
    monkeypatch.setattr(parts_of_k, "MAX_PARTS", 3)
    packed, x = linear.pack_weight(matrix(70, 700), INTEGERS[0]), randn(3, 700)
    num_bytes, got = packed.nbytes, linear.packed_linear(x, packed)
    assert packed.native is not None
    assert packed.nbytes == num_bytes
    moved = packed.moved(torch.clone)
    assert moved.native is None
    assert torch.equal(linear.packed_linear(x, moved), got)


@pytest.mark.parametrize("scheme", [INTEGERS[0], INTEGERS[1], CODES[0]], ids=str)
def test_parts_are_counted_back_to_none(scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a product that was recorded can be repeated, and one with more rows be made between."""
    monkeypatch.setattr(parts_of_k, "MAX_PARTS", 3)
    torch.manual_seed(0)
    packed, bias = linear.pack_weight(matrix(70, 700), scheme), randn(70)
    x = randn(linear.MAX_ROWS, 700)
    first = linear.packed_linear(x[:3], packed, bias)
    counts = packed.native
    assert not counts.any()
    many = linear.packed_linear(x, packed, bias)
    assert len(packed.native) > len(counts)
    assert not packed.native.any()
    assert torch.equal(linear.packed_linear(x[:3], packed, bias), first)
    torch.testing.assert_close(many[:3], first, rtol=1e-5, atol=1e-5)


@triton.jit
def _planes_of(out, words, zeros, PLANES: tl.constexpr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    for plane in tl.static_range(PLANES):
        code = codes._integers(tl.load(words + index), plane, tl.load(zeros + index), out.dtype.element_ty)
        tl.store(out + plane * TILE + index, code)


def test_codes_are_the_last_bits_of_numbers() -> None:
    """Also in bfloat16, with which the interpreter does not reckon."""
    nibbles = torch.arange(16, dtype=torch.int16)
    bases = codes.BFLOAT16_BASE, codes.FLOAT16_BASE
    bits = codes.BFLOAT16_BITS, codes.FLOAT16_BITS
    for dtype, base, of_base in zip((torch.bfloat16, torch.float16), bases, bits, strict=True):
        numbers = (nibbles | of_base.value).view(dtype)
        assert torch.equal(numbers.int(), nibbles.int() + base.value)
        for zero in range(16):
            assert torch.equal(
                numbers - torch.tensor(base.value + zero, dtype=dtype), (nibbles - zero).to(dtype)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_become_numbers_of_any_dtype_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256) // 3 % 16
    zeros, out = torch.arange(32, dtype=torch.int32) % 16, torch.empty(8, 32, dtype=dtype)
    _planes_of[(1,)](out, to_words(codes), zeros, PLANES=8, TILE=32)
    assert torch.equal(out.int(), codes.view(8, 32).int() - zeros)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_product_that_ends_in_an_activation_is_both_ops(function: Function) -> None:
    torch.manual_seed(0)
    packed, x, bias = linear.pack_weight(matrix(34, 45), INTEGERS[0]), randn(3, 45), randn(34)
    want = elementwise.activate(linear.packed_linear(x, packed, bias), function)
    assert torch.equal(linear.packed_linear(x, packed, bias, function), want)


@pytest.mark.parametrize("scheme", [*INTEGERS, *CODES], ids=str)
def test_many_rows_are_left_to_the_vendors_library(
    scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MAX_ROWS", 4)
    torch.manual_seed(0)
    weight, x, bias = matrix(34, 150), randn(5, 150), randn(34)
    packed = linear.pack_weight(weight, scheme)
    want = torch.nn.functional.linear(x, stands_for(weight, scheme), bias)
    assert torch.equal(linear.packed_linear(x, packed, bias), want)


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize(
    "scheme", [*INTEGERS[:2], CODES[0], CODES[6], FLOAT, replace(FP8[0], vendor=False)], ids=str
)
def test_a_product_in_float32_is_rounded_to_nothing_else(
    scheme: WeightScheme, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logits are: what comes out in the activations' dtype is that, rounded."""
    monkeypatch.setattr(linear, "MAX_ROWS", 8)
    torch.manual_seed(0)
    packed, bias = linear.pack_weight(matrix(34, 150).half(), scheme), randn(34)
    x = randn(rows, 150, dtype=torch.float16)
    wide = linear.packed_linear(x, packed, bias, dtype=torch.float32)
    assert wide.dtype is torch.float32
    assert not torch.equal(wide, wide.half().float())
    assert torch.equal(linear.packed_linear(x, packed, bias), wide.half())


def test_fp8_in_float32_is_no_business_of_the_vendors_library() -> None:
    torch.manual_seed(0)
    packed, x = linear.pack_weight(matrix(48, 64), FP8[0]), randn(3, 64, dtype=torch.float16)
    own = replace(packed, scheme=replace(FP8[0], vendor=False))
    wide = linear.packed_linear(x, packed, dtype=torch.float32)
    assert torch.equal(wide, linear.packed_linear(x, own, dtype=torch.float32))
    assert not torch.equal(wide, wide.bfloat16().float())


@pytest.mark.parametrize("scheme", [*INTEGERS, *CODES, FLOAT], ids=str)
def test_packed_embedding(scheme: WeightScheme) -> None:
    torch.manual_seed(0)
    weight = matrix(31, 1100)
    packed, rounded = linear.pack_weight(weight, scheme), stands_for(weight, scheme)
    for count in (0, 1, 13):
        ids = torch.randint(0, 31, (count,))
        assert torch.equal(linear.packed_embedding(ids, packed), rounded[ids])
    outside = linear.packed_embedding(torch.tensor([-1, 31, 3]), packed)
    assert not outside[:2].any()
    assert torch.equal(outside[2], rounded[3])


@pytest.mark.parametrize("scheme", [*INTEGERS, *CODES], ids=str)
def test_widened_is_rounded_once(scheme: WeightScheme) -> None:
    torch.manual_seed(0)
    weight = matrix(9, 140)
    packed = linear.pack_weight(weight, scheme)
    assert torch.equal(codes.widened(packed, torch.float16), stands_for(weight, scheme).half())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("group", [0, 32])
def test_minimums(kind: str, group: int) -> None:
    torch.manual_seed(0)
    shape, groups = (34, 300), -(-300 // group) if group else 1
    data = torch.randint(0, 16, shape, dtype=torch.uint8)
    data = data.view(torch.int8) if kind == "int8" else data
    scheme, streams = (
        WeightScheme(kind, group, False),
        (torch.rand(34, groups).half(), torch.rand(34, groups)),
    )
    packed = format_of(scheme).from_numbers(Numbers(data, *streams), scheme, layout="rows")
    x, want = randn(3, 300), reference.unpack_weight(packed)
    assert torch.equal(codes.widened(packed, torch.float32), want)
    torch.testing.assert_close(linear.packed_linear(x, packed), x @ want.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_linear(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = randn(70, 130, dtype=dtype), randn(150, 130, dtype=dtype), randn(150, dtype=dtype)
    torch.testing.assert_close(
        matmul.invariant_linear(x, weight, bias), reference.linear(x, weight, bias), rtol=2e-3, atol=2e-2
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [(scheme, torch.float16) for scheme in (FLOAT, *INTEGERS[:3], *CODES[:2], *FP8)]
    + [(scheme, torch.float32) for scheme in (FLOAT, INTEGERS[1], CODES[0], FP8[0])],
    ids=str,
)
def test_invariant_weight_gives_a_row_the_same_bits_in_any_batch(
    scheme: WeightScheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        linear, "MAX_ROWS", 8
    )  # what a weight that is not invariant would be left to the vendor from
    torch.manual_seed(0)
    x, bias = randn(70, 260, dtype=dtype), randn(150)
    packed = linear.pack_weight(randn(150, 260, dtype=dtype), replace(scheme, invariant=True))
    whole = linear.packed_linear(x, packed, bias)
    for start, end in [(0, 1), (3, 6), (2, 66), (5, 70)]:
        assert torch.equal(linear.packed_linear(x[start:end], packed, bias), whole[start:end]), (start, end)


@pytest.mark.parametrize("vendor", [True, False])
def test_rows_that_come_quantized_give_the_same_product(vendor: bool) -> None:
    torch.manual_seed(0)
    x, bias = randn(70, 64, dtype=torch.float16), randn(48)
    packed = linear.pack_weight(matrix(48, 64), WeightScheme("fp8", vendor=vendor))
    for rows in (0, 1, 70):
        for gate in (None, "silu_and_mul"):
            args = (packed, bias, gate)
            got = linear.packed_linear(quantize.quantize_rows(x[:rows]), *args)
            assert torch.equal(got, linear.packed_linear(x[:rows], *args))
            want = reference.packed_linear(reference.quantize_rows(x[:rows]), *args)
            assert torch.equal(want, reference.packed_linear(x[:rows], *args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vendor", [True, False])
@pytest.mark.parametrize("scheme", FP8, ids=["row", "tensor"])
def test_fp8_linear(scheme: WeightScheme, vendor: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = replace(scheme, vendor=vendor)
    for outputs, inputs in [(48, 64), (35, 150)]:
        weight, bias = matrix(outputs, inputs), randn(outputs)
        packed = linear.pack_weight(weight, scheme)
        assert packed.nbytes == outputs * (inputs + 4)
        for rows in (0, 1, 70):
            # E4M3 numbers and a scale of 1/64: the interpreter rounds others wrongly (see above).
            x = randn(rows, inputs).to(torch.float8_e4m3fn).to(dtype)
            x[:, 0] = 7.0
            got = linear.packed_linear(x, packed, bias)
            assert got.dtype == dtype
            want = reference.packed_linear(x.float(), packed, bias)
            torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
            whole = reference.linear(x.float(), weight, bias)
            torch.testing.assert_close(got.float(), whole, rtol=0.2, atol=0.2)


def test_fp8_split_k_has_the_bits_of_one_program() -> None:
    packed = linear.pack_weight(matrix(40, 1100), WeightScheme("fp8"))
    assert parts_of_k.split_k(1, -(-1100 // 256))[0] == 5
    rows = quantize.quantize_rows(torch.randn(quantize.BLOCK_M + 1, 1100))
    alone = QuantizedRows(rows.values[:3], rows.scales[:3], rows.dtype)
    many = quantize.fp8_linear(rows, packed, None, torch.float32)
    torch.testing.assert_close(
        many,
        reference.linear(rows.values.float() * rows.scales.view(-1, 1), codes.widened(packed, torch.float32)),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(quantize.fp8_linear(alone, packed, None, torch.float32), many[:3])


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_weights_keep_special_values(per_tensor: bool) -> None:
    weight = torch.tensor([[1.0, -2.0, 448.0], [0.0, 0.0, 0.0], [1e-3, 2e-3, -3e-3]])
    scheme = WeightScheme("fp8", per_tensor=per_tensor)
    packed = linear.pack_weight(weight, scheme)
    assert packed.scales is not None
    assert packed.scales.tolist() == ([1.0] * 3 if per_tensor else [1.0, 0.0, packed.scales[2].item()])
    assert torch.equal(reference.unpack_weight(packed)[:2], weight[:2])
    weight[0, 0] = torch.inf
    spoilt = reference.unpack_weight(linear.pack_weight(weight, scheme))
    assert spoilt.isnan().any(1).tolist() == [True, per_tensor, per_tensor]


def test_fp8_is_refused_where_nothing_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later; Old GPU has 8\.0"):
        quantize.check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    quantize.check_device(torch.device("cuda"))
    quantize.check_device(torch.device("cpu"))


def test_weights_are_packed_only_where_a_gpu_gains() -> None:
    """Unquantized weights stay plain for the vendor's library, unless the batch must not matter."""
    row = next(row for row in ops.pack_weight.implementations if row.name == "triton")
    assert row.accepts is not None
    weight = randn(2, 2)
    assert not row.accepts(weight, WeightScheme())
    assert all(row.accepts(weight, scheme, 2) for scheme in (FLOAT, *INTEGERS, *FP8))


def test_panels_are_no_business_of_the_gpu_kernels() -> None:
    panels, rows = (pack(randn(8, 8), INTEGERS[0]) for pack in (reference.pack_weight, linear.pack_weight))
    for op in (ops.packed_linear, ops.packed_embedding):
        row = next(row for row in op.implementations if row.name == "triton")
        assert row.accepts is not None
        assert [row.accepts(randn(1, 8), weight) for weight in (panels, rows)] == [False, True]


def test_memory_of_a_packed_weight() -> None:
    sizes = {scheme.kind: packed_bytes(scheme) for scheme in (FLOAT, INTEGERS[0], INTEGERS[1], FP8[0])}
    assert sizes == {
        "float": 64 * 256 * 4,
        "int8": 64 * (256 + 4),
        "int4": 64 * (128 + 2 * 8),
        "fp8": 64 * (256 + 4),
    }


def packed_bytes(scheme: WeightScheme) -> int:
    packed: PackedWeight = linear.pack_weight(randn(64, 256), scheme)
    return packed.nbytes


def test_packing_on_a_gpu_passes_halves_by_name() -> None:
    row = next(row for row in ops.TABLE["pack_weight"].implementations if row.name == "triton")
    weight = matrix(4, 32)
    assert row.accepts(weight, INTEGERS[0], halves=2)
    assert not row.accepts(weight, WeightScheme(), halves=2)


@pytest.mark.parametrize("kind", ["e2m1", "iq4_nl", "nf4"])
def test_books_are_packed_on_the_device_of_the_weight(kind: str) -> None:
    packed = linear.pack_weight(matrix(4, 64).to("meta"), WeightScheme(kind, 32))
    assert packed.data.is_meta
