# SPDX-License-Identifier: Apache-2.0
"""Graphs by key: when a pass is run before one, where results stand, and in which order they are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.worker.graphs import GraphCache, GraphMemory, RowBuffer, row_variant
from tests.worker.fake_gpu import FakeGpu


class Counting:
    """Function captured in graphs that returns rows of the given size and counts its launches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Tensor:
        self.sizes.append(size)
        return torch.full((size, 2), float(size))


def graphs_of(run: Counting) -> tuple[GraphCache[int], GraphMemory, FakeGpu]:
    gpu = FakeGpu()
    room = GraphMemory(gpu, 64)
    return GraphCache[int](room, run, row_variant, room.hidden), room, gpu


def test_a_graph_is_captured_once() -> None:
    graphs, _, gpu = graphs_of(run := Counting())
    for _ in range(3):
        graphs.capture(3)
    assert run.sizes == [3, 3]  # a pass that compiles kernels, and what is recorded
    assert gpu.captured == [3]
    assert 3 in graphs
    assert len(graphs) == 1
    assert torch.equal(graphs.replay(3), torch.full((3, 2), 3.0))


def test_a_pass_is_run_for_each_variant_of_kernels_only() -> None:
    graphs, _, gpu = graphs_of(run := Counting())
    sizes = [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]
    for size in sizes:
        graphs.capture(size)
    assert gpu.captured == sizes
    assert sorted(run.sizes, reverse=True) == sorted([*sizes, 64, 56, 32, 24, 16, 8, 4, 2, 1], reverse=True)


def test_all_results_stand_in_one_place() -> None:
    graphs, room, _ = graphs_of(Counting())
    for size in (64, 5):
        graphs.capture(size)
    large = graphs.replay(64)
    small = graphs.replay(5)
    assert large.data_ptr() == small.data_ptr() == room.hidden.first(1).data_ptr()
    assert (small == 5.0).all()


def test_rows_are_put_where_graphs_read_them() -> None:
    kept = RowBuffer(4)
    first = kept.take(torch.ones(2, 3))
    assert kept.take(first).data_ptr() == first.data_ptr()
    assert torch.equal(kept.take(torch.full((4, 3), 2.0)), kept.first(4))
    assert (first == 2.0).all()
    kept.clear()
    assert not first.any()


def test_graphs_of_all_features_are_captured_in_order() -> None:
    room, made = GraphMemory(FakeGpu(), 4), list[tuple[str, bool]]()

    for name in ("passes", "choices"):
        room.add(lambda only_largest, name=name: made.append((name, only_largest)) or 1)
    room.capture_all()
    room.capture_all(only_largest=True)
    assert made == [("passes", False), ("choices", False), ("passes", True), ("choices", True)]


def test_triton_specializations_are_distinguished() -> None:
    variants = [row_variant(count) for count in range(1, 33)]
    assert row_variant(1) not in variants[1:]
    assert row_variant(24) == row_variant(17)
    assert row_variant(32) != row_variant(31)


def test_the_fake_device_notices_that_inputs_were_moved() -> None:
    gpu, inputs = FakeGpu(), [torch.ones(3, 2)]
    replay, output = gpu.capture(lambda: inputs[-1] * 2, gpu.graph_pool())
    inputs[0].fill_(4.0)
    replay()
    assert (output == 8.0).all()
    inputs.append(torch.ones(3, 2))
    with pytest.raises(AssertionError, match="where it was captured"):
        replay()
