# SPDX-License-Identifier: Apache-2.0
"""Rows of activations in E4M3, in Triton's interpreter: against the oracle, and one pass against two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels import ops, reference
from quire.kernels.linear import QuantizedRows
from quire.kernels.triton import quantize
from tests.kernels.op_cases import CASES, randn

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are meant
DTYPES = [torch.float32, torch.float16]
"""What the interpreter gets right."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_scales_and_codes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = randn(9, 80, dtype=dtype)[:, 10:]
    x[4] = 0.0
    rows, oracle = quantize.quantize_rows(x), reference.quantize_rows(x)
    assert (rows.dtype, rows.shape, rows.device) == (x.dtype, x.shape, x.device)
    assert torch.equal(rows.scales, (x.float().abs().amax(1, keepdim=True) / 448.0).clamp(min=1e-12))
    assert torch.equal(rows.scales, oracle.scales)
    # The interpreter drops the carry where rounding reaches a power of two; everything else must be torch's rounding.
    expected = oracle.values.float()
    differs = rows.values.float() != expected
    mantissa, _ = expected[differs].frexp()
    assert (mantissa.abs() == 0.5).all()


FP8_OPS = [name for name in ops.TABLE if name.endswith("_fp8")]


def kernel(name: str) -> Callable[..., Any]:
    (row,) = (row for row in ops.TABLE[name].implementations if row.name == "triton")
    return row.load()


def parts(result: Any) -> list[Tensor]:
    """Bits of the first result, quantized by a second pass if need be, and the others."""
    first, *others = result if isinstance(result, tuple) else (result,)
    rows = first if isinstance(first, QuantizedRows) else quantize.quantize_rows(first)
    return [rows.values.view(torch.uint8), rows.scales, *others]


@pytest.mark.more
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FP8_OPS)
def test_fused_row_quantization_has_the_bits_of_a_second_pass(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for args, options in CASES[name](dtype):
        got, want = kernel(name)(*args, **options), kernel(name.removesuffix("_fp8"))(*args, **options)
        assert all(map(torch.equal, parts(got), parts(want)))
        rows = got[0] if isinstance(got, tuple) else got
        assert rows.dtype == dtype
        oracle = ops.TABLE[name].oracle(*args, **options)
        scales = (oracle[0] if isinstance(oracle, tuple) else oracle).scales
        torch.testing.assert_close(rows.scales, scales, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("name", FP8_OPS)
def test_a_row_is_quantized_alike_in_any_batch(name: str) -> None:
    torch.manual_seed(0)
    x, residual, weight = (randn(*shape, dtype=torch.float16) for shape in [(9, 154), (9, 154), (154,)])
    tensors = (x, residual) if "add" in name else (x,)
    rest = (weight, 1e-6) if "norm" in name else ()
    whole = parts(kernel(name)(*tensors, *rest))
    for rows in (slice(0, 1), slice(3, 8)):
        part = parts(kernel(name)(*(tensor[rows] for tensor in tensors), *rest))
        assert all(torch.equal(got, want[rows]) for got, want in zip(part, whole, strict=True))
