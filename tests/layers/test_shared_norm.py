# SPDX-License-Identifier: Apache-2.0
"""A norm whose row is shared by ranks is that of the whole row, with bits that no number of ranks changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.layers.head_norms import SharedRMSNorm, added_up
from quire.layers.shard import WHOLE, Shard, ShardSpan
from tests.fixtures.folded import folded
from tests.fixtures.thread_ranks import InProcess

SIZE, EPS = 6, 1e-5


def norm(
    heads: int, groups: int, weight: Tensor, shard: Shard = WHOLE, by_units: bool = False
) -> SharedRMSNorm:
    span = ShardSpan(heads, SIZE, replicated=True)
    made = SharedRMSNorm(span, groups=groups, eps=EPS, dtype=torch.float32, name="norm")
    made.by_units = by_units
    made.create_weights(None, shard)
    ((_, slot),) = made.slots(["norm"])
    slot.fill(weight[slot.source.box])
    return made


def shared(heads: int, groups: int, size: int, x: Tensor, weight: Tensor, by_units: bool) -> Tensor:
    """Return the ranks' outputs put together; ranks that share a head must compute the same for it."""

    def work(group: InProcess) -> tuple[slice, Tensor]:
        made = norm(heads, groups, weight, Shard.of_group(group), by_units)
        return made.own, made(x[:, made.own])

    out = torch.full_like(x, torch.nan)
    with ThreadPoolExecutor(size) as threads:
        for own, part in threads.map(work, InProcess.group(size)):
            there = out[:, own]
            assert there.isnan().all() or torch.equal(there, part)
            out[:, own] = part
    return out


@pytest.mark.parametrize(
    ("heads", "groups", "sizes"), [(4, 1, (2, 4)), (8, 2, (2, 4, 8)), (2, 1, (2, 4)), (6, 1, (2, 3))]
)
def test_norm_of_sharded_rows_equals_one_rank(heads: int, groups: int, sizes: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(heads)
    x, weight = torch.randn(7, heads * SIZE, generator=random), torch.randn(heads * SIZE, generator=random)
    rows = x.double().view(7, groups, -1)
    wanted = rows / (rows.square().mean(2, keepdim=True) + EPS).sqrt()
    wanted = (wanted.view(7, -1) * weight).float()
    one = norm(heads, groups, weight, by_units=True)(x)
    for made in (one, norm(heads, groups, weight)(x)):
        torch.testing.assert_close(made, wanted)
    for size in sizes:
        torch.testing.assert_close(shared(heads, groups, size, x, weight, by_units=False), wanted)
        assert torch.equal(shared(heads, groups, size, x, weight, by_units=True), one)
    assert torch.equal(norm(heads, groups, weight, by_units=True)(x[2:3]), one[2:3]), "no batch changes a bit"


@folded("count", range(1, 12))
def test_all_elements_are_added_up_once(count: int) -> None:
    x = 2.0 ** torch.arange(count)
    assert added_up(x.expand(3, count)).tolist() == [2.0**count - 1] * 3
