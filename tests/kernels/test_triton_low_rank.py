# SPDX-License-Identifier: Apache-2.0
"""The GPU's `low_rank_linear` in Triton's interpreter: against the oracle, and a row against itself in company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels import ops
from quire.kernels.triton import low_rank
from tests.fixtures.quick import quick
from tests.kernels.op_cases import compare, low_rank_stacks, randn

PARTS, INPUTS = [140, 3, 60], 1100
"""Tiles of outputs that belong to several parts, and k in several parts, the last of which is not full."""


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.float16], [torch.float16]), ids=str)
def test_the_oracle(dtype: torch.dtype) -> None:
    compare(ops.low_rank_linear, low_rank.low_rank_linear, dtype, "cpu")


@pytest.mark.more
def test_a_row_has_the_bits_that_it_has_alone() -> None:
    torch.manual_seed(0)
    adapters, x = low_rank_stacks(2, PARTS, INPUTS, 32), randn(20, INPUTS)
    rows = torch.randint(-1, 3, (20,), dtype=torch.int32)
    together = torch.ones(20, sum(PARTS))
    low_rank.low_rank_linear(together, x, rows, adapters)
    for i in range(20):
        alone = torch.ones(1, sum(PARTS))
        low_rank.low_rank_linear(alone, x[i : i + 1], rows[i : i + 1], adapters)
        assert torch.equal(alone[0], together[i])
    assert bool((together[(rows < 0) | (rows == 2)] == 1).all()), "a slot that is none adds nothing"
    want = torch.ones(20, sum(PARTS))
    ops.low_rank_linear.oracle(want, x, rows.where(rows < 2, -1), adapters)
    torch.testing.assert_close(together, want, rtol=1e-4, atol=1e-4)
