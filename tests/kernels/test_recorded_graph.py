# SPDX-License-Identifier: Apache-2.0
"""Recorded graphs: a replay has the bits of what was recorded, on new inputs, and nothing unsafe is recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import ops
from quire.kernels.cpu import calls, library, sampling
from quire.kernels.linear import WeightScheme
from tests.fixtures.folded import folded

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu.arena import Arena, ArenaFullError
from quire.kernels.cpu.recorded_graph import RecordingError, record

SIZE = 96
ROOM = 1 << 16
WEIGHT = ops.pack_weight(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)), WeightScheme())
SCALE = torch.linspace(0.5, 2.0, SIZE)


def layer(x: Tensor) -> Tensor:
    """Norm, product, sum, view: what a decoder layer does."""
    y = ops.packed_linear(ops.rms_norm(x, SCALE, 1e-6), WEIGHT)
    y = ops.rms_norm(y.view(-1, 2, SIZE // 2), SCALE[: SIZE // 2], 1e-6).flatten(1)
    return x + y * 0.5


def layers(x: Tensor) -> Tensor:
    for _ in range(3):
        x = layer(x)
    return x


@pytest.mark.parametrize("rows", [1, 5])
def test_recorded_graph_replays_on_new_inputs(rows: int) -> None:
    place = torch.randn(rows, SIZE)
    graph = record(lambda: layers(place), Arena(ROOM))
    assert torch.equal(graph.result, layers(place))
    for _ in range(3):
        place.copy_(torch.randn(rows, SIZE))
        assert graph.replay()
        assert torch.equal(graph.result, layers(place))


def test_recorded_graphs_share_an_arena_in_any_order() -> None:
    arena, places = Arena(ROOM), [torch.randn(rows, SIZE) for rows in (4, 1, 2)]
    graphs = [record(lambda place=place: layers(place), arena) for place in places]  # type: ignore[misc]
    for index in (2, 0, 1, 0, 2):
        places[index].copy_(torch.randn_like(places[index]))
        assert graphs[index].replay()
        assert torch.equal(graphs[index].result, layers(places[index]))


def test_scratch_memory_taken_by_other_calls_does_not_matter() -> None:
    place = torch.randn(2, SIZE)
    graph = record(lambda: layers(place), Arena(ROOM))
    wide = ops.pack_weight(torch.randn(16, 40 * SIZE), WeightScheme())
    ops.packed_linear(torch.randn(192, 40 * SIZE), wide)
    assert graph.replay()
    assert torch.equal(graph.result, layers(place))


@folded("inference", [False, True])
@folded(
    "convert",
    [
        lambda x: x.to(torch.float32),
        lambda x: x.float(),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.t().contiguous().t().float(),
        lambda x: x.clone().contiguous().float(),
        lambda x: x.view(-1, SIZE).unflatten(1, (2, -1)).flatten(1).float(),
    ],
)
def test_conversions_and_copies_are_replayed(convert: Callable[[Tensor], Tensor], inference: bool) -> None:
    """In inference mode torch hands on `to` as a whole, and calls it a view."""
    place = torch.randn(3, SIZE, dtype=torch.bfloat16)
    with torch.inference_mode(inference):
        graph = record(lambda: layer(convert(place)), Arena(ROOM))
        for _ in range(3):
            place.copy_(torch.randn(3, SIZE))
            assert graph.replay()
            assert torch.equal(graph.result, layer(place.float()))


@folded("inference", [False, True])
@folded(
    "compute",
    [
        lambda x: x @ x.T,
        lambda x: torch.cat((-x[:, SIZE // 2 :], x[:, : SIZE // 2]), dim=-1),
        lambda x: x.sin() * x.cos() - x.sigmoid(),
        lambda x: torch.cat([part * 2 for part in x.chunk(3, dim=1)]),
        lambda x: x.max(dim=-1, keepdim=True).values + x,
        lambda x: torch.cat(x.topk(3).values.split(1, dim=1)),
        lambda x: x.t().reshape(-1) + x.t().flatten(),
        lambda x: torch.nn.functional.dropout(x, training=False) + 1,
        lambda x: torch.nn.functional.linear(x, x.softmax(-1), x[:, 0]),
        lambda x: x + torch.arange(SIZE) * torch.full((1,), 0.5),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: ops.rms_norm.oracle(x, SCALE, 1e-6),
    ],
)
def test_torch_operations_are_replayed(compute: Callable[[Tensor], Tensor], inference: bool) -> None:
    """Between kernels, before them and behind them, and several tensors at once."""
    place = torch.randn(3, SIZE)

    def run() -> Tensor:
        made = compute(layer(place))
        return layer(place * made.sum().sigmoid()) + made.mean()

    with torch.inference_mode(inference):
        graph = record(run, Arena(ROOM))
        for _ in range(3):
            place.copy_(torch.randn(3, SIZE))
            expected = run()
            assert graph.replay()
            assert torch.equal(graph.result, expected)


@folded("inference", [False, True])
@folded(
    "computes",
    [
        lambda x: x.add_(1),
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x + torch.rand(1),
        lambda x: torch.nn.functional.dropout(x),
        lambda x: x.copy_(x * 2),
        lambda x: x[torch.tensor([0])],
    ],
)
def test_operation_that_may_depend_on_the_step_is_not_recorded(
    computes: Callable[[Tensor], Tensor], inference: bool
) -> None:
    with torch.inference_mode(inference), pytest.raises(RecordingError, match="aten"):
        record(lambda: computes(torch.ones(2, SIZE)), Arena(ROOM))
    assert calls.recording.listener is None


def test_refused_call_ends_the_replay() -> None:
    ids, table = torch.tensor([1]), torch.randn(4, SIZE)
    graph = record(lambda: ops.rms_norm(ops.embedding(ids, table), SCALE, 1e-6), Arena(ROOM))
    before = graph.result.clone()
    ids.fill_(4)
    assert not graph.replay()
    assert torch.equal(graph.result, before)
    ids.fill_(2)
    assert graph.replay()
    assert torch.equal(graph.result, ops.rms_norm(table[2:3], SCALE, 1e-6))


def test_an_arena_gives_memory_again_once_no_view_is_left() -> None:
    arena = Arena(ROOM)
    first = arena.empty((3, 5), torch.float32)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 5), torch.float32, True)
    address, view = first.data_ptr(), first[1:].t()
    assert address % 64 == 0
    del first
    assert arena.empty((3, 5), torch.float32).data_ptr() != address
    del view
    assert arena.empty((15,), torch.int32).data_ptr() == address
    assert arena.empty((0, 5), torch.int64).shape == (0, 5)


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 8)), max_size=40))
def test_no_two_tensors_that_live_overlap(steps: list[tuple[int, int]]) -> None:
    arena, alive = Arena(ROOM), list[Tensor]()
    for num_bytes, victim in steps:
        tensor = arena.empty((num_bytes,), torch.uint8)
        ends = sorted((one.data_ptr(), one.data_ptr() + len(one)) for one in [*alive, tensor])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        alive.append(tensor)
        if victim < len(alive):
            del alive[victim]


def test_recorded_graphs_take_the_memory_of_the_largest() -> None:
    arena = Arena(ROOM)
    taken = []
    for rows in (1, 5, 2, 16, 3, 9):
        place = torch.randn(rows, SIZE)
        record(lambda place=place: layers(place), arena)  # type: ignore[misc]
        taken.append(arena.peak_bytes)
    assert taken[3] == taken[-1]
    alone, place = Arena(ROOM), torch.randn(16, SIZE)
    record(lambda: layers(place), alone)
    assert arena.peak_bytes == alone.peak_bytes


def test_graph_beyond_the_arena_is_not_recorded() -> None:
    place = torch.randn(16, SIZE)
    with pytest.raises(ArenaFullError, match="more than the 4096 bytes kept for them"):
        record(lambda: layers(place), Arena(4096))
    assert calls.recording.listener is None


def test_recorded_graph_ends_before_sampling_non_finite_logits() -> None:
    logits, keys = torch.randn(3, 50), torch.arange(6).view(3, 2)
    settings = torch.tensor(
        [[0.0, -torch.inf, 50.0, 1.0], [0.7, -torch.inf, 9.0, 0.9], [1.0, -2.0, 50.0, 1.0]]
    )
    settings = settings.double()
    seeds, positions = keys.t().contiguous()

    def choose() -> Tensor:
        sampling.require_usable(logits)
        return sampling.sample_by_inversion(logits, settings, sampling.uniforms_at(seeds, positions))

    graph = record(choose, Arena(ROOM))
    for bad in (torch.nan, torch.inf):
        logits.copy_(torch.randn(3, 50))
        assert graph.replay()
        assert torch.equal(graph.result, ops.sample_tokens(logits, settings, keys))
        chosen = graph.result.clone()
        logits[1, 7] = bad
        assert not graph.replay()
        assert torch.equal(graph.result, chosen)
        with pytest.raises(sampling.UnusableLogitsError, match="1 of 3 rows of logits are not finite"):
            choose()
        with pytest.raises(sampling.UnusableLogitsError):
            record(choose, Arena(ROOM))
    logits.copy_(torch.randn(3, 50))
    logits[:, 1:] = -torch.inf
    assert graph.replay(), "one token is enough"
    assert graph.result.tolist() == [0, 0, 0]
    logits[0] = -torch.inf
    assert not graph.replay(), "there is none"
