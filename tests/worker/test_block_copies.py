# SPDX-License-Identifier: Apache-2.0
"""Block moves on real tensors: what moves, in which order, and which ids are refused."""

from __future__ import annotations

import pytest
import torch

from quire.errors import EngineError
from quire.scheduler.output import SchedulerOutput
from quire.worker.block_copies import BlockCopier, copy_on_host
from tests.fixtures.folded import folded

Moves = list[tuple[int, int]]


def plan(swap_outs: Moves = (), swap_ins: Moves = (), block_copies: Moves = ()) -> SchedulerOutput:
    return SchedulerOutput(
        1,
        [],
        [],
        [],
        swap_outs=list(swap_outs),
        swap_ins=list(swap_ins),
        block_copies=list(block_copies),
    )


def tier(num_blocks: int, dtype: torch.dtype, first: int) -> list[torch.Tensor]:
    """Two layers of different widths; every block holds its own number."""
    numbers = torch.arange(first, first + num_blocks).to(dtype)
    return [numbers[:, None].repeat(1, width) for width in (4, 12)]


def numbers(tensors: list[torch.Tensor]) -> list[int]:
    """Return the number in each block, which is the same in all layers and at each place."""
    found = {tuple(column) for tensor in tensors for column in tensor.t().tolist()}
    (blocks,) = found
    return [int(number) for number in blocks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_moves_are_made_in_the_order_of_the_lists(dtype: torch.dtype) -> None:
    device, host = tier(5, dtype, 10), tier(3, dtype, 50)
    BlockCopier(device, host, copy_on_host).execute(plan([(1, 2)], [(2, 3), (1, 1)], [(3, 4), (1, 2)]))
    assert numbers(host) == [50, 51, 11]
    assert numbers(device) == [10, 51, 51, 11, 11]


def test_a_plan_without_moves_changes_nothing() -> None:
    device, host = tier(3, torch.float32, 10), tier(1, torch.float32, 50)
    BlockCopier(device, host, copy_on_host).execute(plan())
    assert numbers(device) == [10, 11, 12]


@folded(
    ("moves", "message"),
    [
        ({"swap_outs": [(0, 1)]}, r"swap_outs from blocks \[0\]: ids must be in \[1, 5\)"),
        ({"swap_outs": [(1, 3)]}, r"swap_outs to blocks \[3\]: ids must be in \[1, 3\)"),
        ({"swap_outs": [(1, 1), (2, 1)]}, "write a block twice"),
        ({"swap_ins": [(3, 1)]}, "swap_ins from blocks"),
        ({"swap_ins": [(1, -1)]}, "swap_ins to blocks"),
        ({"block_copies": [(1, 5)]}, "block_copies to blocks"),
        ({"block_copies": [(1, 2), (2, 3)]}, "read and write the same block"),
    ],
)
def test_bad_ids_are_refused_before_they_index_anything(moves: dict[str, Moves], message: str) -> None:
    device, host = tier(5, torch.float32, 10), tier(3, torch.float32, 50)
    with pytest.raises(EngineError, match=message):
        BlockCopier(device, host, copy_on_host).execute(plan(**moves))
    assert (numbers(device), numbers(host)) == ([10, 11, 12, 13, 14], [50, 51, 52])
