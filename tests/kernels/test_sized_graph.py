# SPDX-License-Identifier: Apache-2.0
"""Recorded graphs of any size: each size has the bits of what runs as it is, or there is no such graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library
from quire.kernels.linear import WeightScheme
from tests.fixtures.folded import folded

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu.arena import Arena, ArenaFullError
from quire.kernels.cpu.recorded_graph import RecordingError
from quire.kernels.cpu.sized_graph import SizedGraph, StepSize, record_sized
from tests.kernels.test_recorded_graph import SIZE, layers

MOST, HEADS, BLOCK = 24, 2, 16
ROOM = 1 << 20
WIDTH = SIZE // HEADS
GENERATOR = torch.Generator().manual_seed(2)
TO_QKV = ops.pack_weight(torch.randn(3 * SIZE, SIZE, generator=GENERATOR), WeightScheme())
WIDE = ops.pack_weight(torch.randn(64, 40 * SIZE, generator=GENERATOR), WeightScheme())


class Places:
    """Inputs of steps of up to `MOST` requests and tokens, and the cache they write to."""

    def __init__(self) -> None:
        self.x = torch.randn(MOST, SIZE)
        self.starts = torch.zeros(MOST + 1, dtype=torch.int32)
        self.lengths = torch.zeros(MOST, dtype=torch.int32)
        self.tables = torch.arange(MOST, dtype=torch.int32)[:, None].contiguous()
        self.slots = torch.zeros(MOST, dtype=torch.int64)
        self.caches = [torch.zeros(MOST, HEADS, WIDTH, BLOCK), torch.zeros(MOST, HEADS, BLOCK, WIDTH)]

    def fill(self, lengths: list[int]) -> StepSize:
        """Another step, of requests with so many tokens, the first ones of theirs."""
        size = StepSize(len(lengths), sum(lengths))
        self.x.normal_()
        self.lengths[: size.requests] = torch.tensor(lengths, dtype=torch.int32)
        self.starts[1 : size.requests + 1] = self.lengths[: size.requests].cumsum(0)
        slots = [request * BLOCK + place for request, count in enumerate(lengths) for place in range(count)]
        self.slots[: size.tokens] = torch.tensor(slots)
        for cache in self.caches:
            cache.zero_()
        return size

    def attention(self, size: StepSize) -> Tensor:
        """A layer with attention over what it writes, and what torch makes of it."""
        requests, tokens = size
        x = self.x[:tokens]
        q, k, v = (
            part.view(tokens, HEADS, WIDTH) for part in ops.packed_linear(x, TO_QKV).split([SIZE] * 3, dim=1)
        )
        metadata = AttentionMetadata(
            self.starts[: requests + 1],
            self.lengths[:requests],
            self.tables[:requests],
            0,
            0,
            self.slots[:tokens],
        )
        keys, values = self.caches
        ops.write_kv(k, v, keys, values, metadata.slot_mapping)
        found = ops.paged_attention(q, keys, values, metadata, WIDTH**-0.5)
        return x + found.flatten(1) * 0.5 + torch.cat((v.flatten(1)[:, 1:], x[:, :1]), dim=1)

    def layers(self, size: StepSize) -> Tensor:
        """Layers without attention."""
        return layers(self.x[: size.tokens])

    def wide(self, size: StepSize) -> Tensor:
        """A product that takes more scratch memory the more rows it has, up to some."""
        return ops.packed_linear(self.x[: size.tokens].repeat(1, 40), WIDE)


STEPS = {"attention": Places.attention, "layers": Places.layers, "scratch": Places.wide}
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda each: 2 <= sum(each) <= MOST)


def opened(places: Places, step: Callable[[Places, StepSize], Tensor]) -> SizedGraph:
    return record_sized(lambda size: step(places, size), StepSize(MOST, MOST), Arena(ROOM))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_every_size_has_the_bits_of_an_eager_run(
    step: Callable[[Places, StepSize], Tensor], steps: list[list[int]]
) -> None:
    places = Places()
    graph = opened(places, step)
    for lengths in steps:
        size = places.fill(lengths)
        expected = step(places, size)
        assert graph.replay(size)
        assert torch.equal(graph.result(size.tokens), expected)


def test_no_kernel_runs_while_a_graph_is_recorded() -> None:
    places = Places()
    places.fill([3, 2])
    opened(places, Places.attention)
    assert not any(cache.any() for cache in places.caches)


def test_refused_call_ends_the_recording_next_step_is_replayed() -> None:
    places = Places()
    graph = opened(places, Places.attention)
    size = places.fill([3, 2])
    places.tables[1] = MOST
    assert not graph.replay(size)
    places.tables[1] = 1
    assert graph.replay(size)
    assert torch.equal(graph.result(size.tokens), Places.attention(places, size))


@folded(
    ("step", "problem"),
    [
        (lambda places, size: places.layers(size)[1:], "not the first rows"),
        (lambda places, size: places.layers(StepSize(1, min(size.tokens, 9))), "are not linear"),
        (lambda places, size: places.x[: size.tokens] * float(size.tokens % 3), "make different calls"),
        (lambda places, size: places.x[: size.tokens] * size.tokens**2, "are not linear"),
        (lambda places, size: places.x[: size.tokens] + places.x[0, size.tokens % 2], "are not linear"),
        (lambda places, size: places.layers(size) if size.tokens > 2 else places.wide(size), "make different calls"),
        (lambda places, size: places.x[: size.tokens] * places.x[0, 0].item(), "_local_scalar_dense"),
    ],
)  # fmt: skip
def test_step_not_determined_by_its_sizes_is_not_recorded(
    step: Callable[[Places, StepSize], Tensor], problem: str
) -> None:
    with pytest.raises(RecordingError, match=problem):
        opened(Places(), step)


def test_numbers_that_grow_with_a_step_reach_torch_unchanged() -> None:
    places = Places()
    graph = opened(places, lambda places, size: places.x[: size.tokens] * (3 * size.tokens + size.requests))
    for lengths in ([2], [1, 1, 4], [9, 9]):
        size = places.fill(lengths)
        assert graph.replay(size)
        assert torch.equal(
            graph.result(size.tokens), places.x[: size.tokens] * (3 * size.tokens + size.requests)
        )


def test_recording_beyond_the_arena_is_an_error() -> None:
    places = Places()
    with pytest.raises(ArenaFullError, match="take more than the 64 bytes"):
        record_sized(places.layers, StepSize(MOST, MOST), Arena(64))
