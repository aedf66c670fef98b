# SPDX-License-Identifier: Apache-2.0
"""`low_rank_linear` in C++: the bits of a row do not depend on other rows or their adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, ops
from quire.kernels.low_rank import LowRankStacks
from tests.kernels.op_cases import low_rank_stacks

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
PARTS, INPUTS = [140, 3, 1100], 77


def added(x: Tensor, rows: Tensor, adapters: LowRankStacks) -> Tensor:
    out = torch.ones(len(x), sum(PARTS))
    ops.low_rank_linear(out, x, rows, adapters)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    adapters, x = low_rank_stacks(3, PARTS, INPUTS, 32, dtype), torch.randn(40, INPUTS)
    for most in (1, 3, 9):
        rows = torch.randint(-1, 3, (40,), dtype=torch.int32).repeat_interleave(most)[:40].contiguous()
        together = added(x, rows, adapters)
        alone = [added(x[i : i + 1], rows[i : i + 1], adapters)[0] for i in range(40)]
        assert torch.equal(together, torch.stack(alone))
        assert bool((together[rows < 0] == 1).all())


def test_invalid_slot_is_refused_before_any_write() -> None:
    adapters, x = low_rank_stacks(2, PARTS, INPUTS, 16), torch.randn(3, INPUTS)
    out, rows = torch.ones(3, sum(PARTS)), torch.tensor([0, 2, 3], dtype=torch.int32)
    with pytest.raises(IndexError, match="the adapters of 2 rows are outside the 2 slots"):
        ops.low_rank_linear(out, x, rows, adapters)
    assert bool((out == 1).all())


def test_wrong_shapes_are_refused() -> None:
    adapters, rows = low_rank_stacks(2, PARTS, INPUTS, 16), torch.zeros(3, dtype=torch.int32)
    out, x = torch.ones(3, sum(PARTS)), torch.randn(3, INPUTS)
    with pytest.raises(ValueError, match=r"x must be \[T, 77\]; it is float32 \[3, 76\]"):
        ops.low_rank_linear(out, x[:, 1:], rows, adapters)
    with pytest.raises(ValueError, match=r"out must be contiguous float32 \[3, 1243\]"):
        ops.low_rank_linear(out[:, 1:], x, rows, adapters)
    with pytest.raises(ValueError, match=r"adapter_rows must be contiguous int32 \[3\]"):
        ops.low_rank_linear(out, x, rows.long(), adapters)
