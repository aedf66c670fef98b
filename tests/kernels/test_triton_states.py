# SPDX-License-Identifier: Apache-2.0
"""The GPU's layers with a state in Triton's interpreter: against the oracle, and themselves in other batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels import ops
from quire.kernels.triton import recurrence, scan
from tests.fixtures.quick import quick
from tests.kernels.op_cases import compare, randn
from tests.kernels.state_batches import NUM_BLOCKS, state_batch

KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv": scan.causal_conv,
    "selective_scan": scan.selective_scan,
    "ssd_scan": scan.ssd_scan,
    "gated_delta": recurrence.gated_delta,
    "rg_lru": recurrence.rg_lru,
    "rwkv7": recurrence.rwkv7,
}
every_kernel = pytest.mark.parametrize("name", list(KERNELS))
BLOCK = 4
ROWS = 14


def is_small(*args: Any, **_options: Any) -> bool:
    """Whether a state, which stands before the metadata, is walked through fast enough for every change."""
    return bool(args[-2][0].numel() <= 200)


def is_feasible(*args: Any, **_options: Any) -> bool:
    """Whether an interpreter is done with all tokens in seconds: the largest state is for the shorter steps."""
    return bool(args[-2][0].numel() * len(args[0]) <= 200_000)


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.float16], [torch.float16]), ids=str)
@every_kernel
def test_near_the_oracle(name: str, dtype: torch.dtype) -> None:
    accepts = is_small if dtype == torch.float16 else is_feasible
    compare(ops.TABLE[name], KERNELS[name], dtype, "cpu", accepts)


def operands(name: str) -> tuple[list[Tensor], list[Tensor | None], tuple[int, ...]]:
    """Return tensors with a row per token, tensors without, and the shape of a state."""
    if name == "causal_conv":
        return [randn(ROWS, 37)], [randn(4, 37), randn(37)], (3, 37)
    if name == "selective_scan":
        return [randn(ROWS, size) for size in (20, 20, 3, 3, 20)], [-randn(3, 20).exp(), randn(20)], (3, 20)
    if name == "ssd_scan":
        shared = [-randn(2).exp(), randn(2), randn(2)]
        return [randn(ROWS, size) for size in (40, 2, 5, 5, 40)], list(shared), (2, 5, 20)
    if name == "gated_delta":
        return [randn(ROWS, 2 * 8 + 2 * 20), randn(ROWS, 4)], [-torch.rand(2), randn(2)], (2, 8, 20)
    if name == "rwkv7":
        return [randn(ROWS, 2 * 12) for _ in range(5)], [randn(5, 2 * 12)], (2, 12, 12)
    shared = [randn(2, 10, 20) * 0.3, randn(2, 20), -8 * torch.rand(20)]
    return [randn(ROWS, 20)], list(shared), (20,)


def call(name: str, rows: list[Tensor], shared: list[Any], kept: Tensor, step: Any) -> Tensor:
    arguments = {
        "causal_conv": lambda x: (x, *shared, kept, step, True),
        "selective_scan": lambda x, dt, b, c, gate: (x, dt, shared[0], b, c, shared[1], gate, kept, step),
        "ssd_scan": lambda x, dt, b, c, gate: (x, dt, shared[0], b, c, *shared[1:], gate, kept, step),
        "gated_delta": lambda qkv, ba: (qkv, ba, *shared, kept, step),
        "rwkv7": lambda r, w, k, v, a: (r, w, k, v, a, *shared, kept, step, 1e-4),
        "rg_lru": lambda x: (x, *shared, kept, step),
    }
    result: Tensor = KERNELS[name](*arguments[name](*rows))
    return result


@pytest.mark.more
@every_kernel
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(name: str) -> None:
    """Also the states that are left at the ends of blocks."""
    torch.manual_seed(0)
    rows, shared, shape = operands(name)
    whole = state_batch([(0, ROWS)], BLOCK)
    expected_states = torch.full((NUM_BLOCKS, *shape), torch.nan)
    expected = call(name, rows, shared, expected_states, whole)
    used = whole.block_tables[0].long()
    for sizes in ([1] * ROWS, [5, 1, 8], [11, 3]):
        kept, start = torch.full((NUM_BLOCKS, *shape), torch.nan), 0
        for size in sizes:
            behind = state_batch([(start, size), (6, 2)], BLOCK)
            tables = behind.block_tables.clone()
            tables[0] = torch.nn.functional.pad(whole.block_tables[0], (0, 9))[: tables.shape[1]]
            tables[1] += 100 * (tables[1] > 0)
            kept[tables[1].max()] = 0.5
            step = replace(behind, block_tables=tables)
            both = [torch.cat([part[start : start + size], part[:2]]) for part in rows]
            got = call(name, both, shared, kept, step)[:size]
            assert torch.equal(got, expected[start : start + size]), (sizes, start)
            start += size
        assert torch.equal(kept[used], expected_states[used])


@every_kernel
def test_a_block_that_is_no_place_for_a_state_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    rows, shared, shape = operands(name)
    kept = randn(3, *shape)
    before, rows = kept.clone(), [part[:6] for part in rows]
    for block in (-1, 0, 3, 2**30):
        step = replace(state_batch([(3, 6)], 16), block_tables=torch.tensor([[block]], dtype=torch.int32))
        assert call(name, rows, shared, kept, step).isfinite().all()
        assert torch.equal(kept, before)
