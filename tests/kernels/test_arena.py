# SPDX-License-Identifier: Apache-2.0
"""Tensors of an arena share nothing while they are there, and large outputs of kernels lie in one that is lent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import calls
from quire.kernels.cpu.arena import Arena, ArenaFullError
from quire.kernels.cpu.calls import LARGE, lending
from quire.worker.stage_sizes import AllocationPeak

ROOM = 1 << 16


@given(st.lists(st.tuples(st.sampled_from([0, 1, 17, 1000, 1200, 3000]), st.integers(0, 5)), max_size=60))
def test_tensors_that_are_there_share_nothing(asked: list[tuple[int, int]]) -> None:
    arena, held = Arena(ROOM), dict[int, tuple[Tensor, int]]()
    for number, (num_floats, place) in enumerate(asked):
        held.pop(place, None)
        held[place] = (arena.empty((num_floats,), torch.float32).fill_(number), number)
        assert all((tensor == written).all() for tensor, written in held.values())
    held.clear()
    assert arena.empty((ROOM // 4,), torch.float32).nbytes == ROOM, "all of it is free again"


def test_view_keeps_its_base_alive() -> None:
    arena = Arena(ROOM)
    view = arena.empty((2, 1000), torch.float32).fill_(1.0)[1]
    arena.empty((2, 1000), torch.float32).fill_(2.0)
    assert (view == 1.0).all()


def test_allocation_beyond_the_arena_is_refused_without_use() -> None:
    arena = Arena(ROOM)
    with pytest.raises(ArenaFullError, match=f"more than the {ROOM} bytes"):
        arena.empty((ROOM + 1,), torch.uint8)
    assert arena.empty((ROOM,), torch.uint8).nbytes == ROOM


def _output(num_bytes: int) -> Tensor:
    return calls.empty(torch.empty(0), num_bytes // 4)


def test_large_kernel_outputs_are_in_an_arena_while_it_has_room() -> None:
    arena = Arena(2 * LARGE)
    with lending.of(arena):
        first = _output(LARGE)
        address, small, narrow = (
            first.data_ptr(),
            _output(LARGE - 4),
            calls.empty(first, LARGE - 1, dtype=torch.int8),
        )
        assert arena.peak_bytes == LARGE
        second, third = _output(LARGE), _output(LARGE)
        assert arena.peak_bytes == 2 * LARGE
        for number, tensor in enumerate([first, second, third, small, narrow]):
            tensor.fill_(number)
        assert [int(tensor[0]) for tensor in (first, second, third, small, narrow)] == [0, 1, 2, 3, 4]
        del first
        assert _output(LARGE).data_ptr() == address
    assert arena.start_of(_output(LARGE)) not in range(2 * LARGE)


def test_allocation_peak_counts_all_and_bypasses_the_arena() -> None:
    arena = Arena(LARGE)
    with lending.of(arena), AllocationPeak() as peak:
        _output(LARGE)
    assert (peak.bytes, arena.peak_bytes) == (LARGE, 0)


def test_inner_arena_is_returned_after_its_block() -> None:
    outer, inner = Arena(LARGE), Arena(LARGE)
    with lending.of(outer):
        with pytest.raises(ZeroDivisionError), lending.of(inner):
            raise ZeroDivisionError
        assert lending.arena is outer
    assert lending.arena is None
