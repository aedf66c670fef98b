# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors: where they go, that they cover, and how they are cut and converted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.errors import ConfigError
from quire.layers.shard import Shard, ShardSpan
from quire.layers.slot import Box, Slot, TensorPart, sizes, uncovered_reason

SHAPE = (6, 5, 4)


def box(*sides: tuple[int, int]) -> Box:
    return tuple(slice(*side) for side in sides)


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Boxes that cover a tensor of `SHAPE`, made by cutting again and again."""
    boxes = [TensorPart.all(SHAPE).box]
    for _ in range(draw(st.integers(0, 6))):
        whole = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, 2))
        at = draw(st.integers(whole[dim].start, whole[dim].stop))
        for side in (slice(whole[dim].start, at), slice(at, whole[dim].stop)):
            boxes.append((*whole[:dim], side, *whole[dim + 1 :]))
    return boxes


@given(tilings(), st.data())
def test_a_tiling_covers_and_nothing_else_does(boxes: list[Box], data: st.DataObject) -> None:
    assert uncovered_reason(SHAPE, boxes) is None
    changed = data.draw(st.sampled_from([part for part in boxes if 0 not in sizes(part)]))
    others = [part for part in boxes if part is not changed]
    assert "have no place" in str(uncovered_reason(SHAPE, others))
    assert "overlap" in str(uncovered_reason(SHAPE, [*boxes, changed]))
    longer = (*changed[:2], slice(changed[2].start, SHAPE[2] + 1))
    assert "reach beyond it" in str(uncovered_reason(SHAPE, [longer]))


@given(units=st.integers(1, 12), unit=st.integers(1, 3), of=st.integers(1, 12), replicated=st.booleans())
def test_the_pieces_of_all_ranks_are_the_span(units: int, unit: int, of: int, replicated: bool) -> None:
    span = ShardSpan(units, unit, replicated)
    try:
        pieces = [span.piece(Shard(rank, of), "fc") for rank in range(of)]
    except ConfigError:
        assert units % of
        assert not replicated or of % units
        return
    outputs = [output for piece in pieces for output in range(piece.start, piece.stop)]
    assert sorted(set(outputs)) == list(range(span.size))
    assert {outputs.count(output) for output in outputs} == {max(1, of // units)}


def test_experts_are_parts_of_one_tensor() -> None:
    stored, weight = torch.randn(4, 3, 2), torch.empty(2, 3, 2)
    for place, expert in enumerate((1, 3)):
        part = TensorPart(
            (4, 3, 2), TensorPart.all((4, 3, 2)).region, box((expert, expert + 1), (0, 3), (0, 2))
        )
        slot = Slot(weight[place : place + 1], "normal", part)
        slot.fill(stored[slot.source.box])
    assert torch.equal(weight, stored[[1, 3]])


def test_stack_members_are_in_place_for_any_shape_in_the_file() -> None:
    """Those of three experts, each of two matrices whose outputs alternate."""
    matrices = torch.randn(3, 2, 5, 4)
    stored = matrices.permute(0, 3, 2, 1).reshape(3, 4, 10)
    parts = []
    for expert in range(3):
        for half in range(2):
            weight = torch.empty(5, 4)
            slot = Slot(weight.t(), "normal").of_stack(expert, 3).of_stack(half, 2, dim=3).merging(2)
            assert slot.source.stored_shape == (3, 4, 10)
            slot.fill(stored.view(slot.source.shape)[slot.source.box])
            assert torch.equal(weight, matrices[expert, half])
            parts.append(slot.source.region)
    assert uncovered_reason((3, 4, 5, 2), parts) is None


def unpacked(rows: Tensor) -> Tensor:
    """Two nibbles from each byte."""
    return torch.stack([rows & 15, rows >> 4], -1).flatten(-2)


def test_packed_integers_are_unpacked_on_the_way() -> None:
    stored = torch.randint(0, 256, (6, 4), dtype=torch.uint8)
    weight = torch.empty(3, 8)
    part = TensorPart((6, 4), TensorPart.all((6, 4)).region, box((3, 6), (0, 4)))
    slot = Slot(weight, "zeros", part, dtypes=(torch.uint8,), convert=unpacked)
    slot.fill(stored[slot.source.box])
    assert torch.equal(weight, unpacked(stored)[3:].float())
    weight.zero_()
    for row in range(3):
        piece = slot.narrow(0, row, row + 1)
        piece.fill(stored[piece.source.box])
    assert torch.equal(weight, unpacked(stored)[3:].float()), "row by row as well"


def test_slot_adopts_only_tensors_stored_in_the_wanted_dtype() -> None:
    taken: list[Tensor] = []
    slot = Slot(torch.empty(2, dtype=torch.float32), "normal", adopt=taken.append)
    wanted = torch.randn(2)
    slot.fill(wanted)
    assert taken[0] is wanted
    slot.fill(wanted.bfloat16())
    assert len(taken) == 1
    assert slot.narrow(0, 0, 1).adopt is None
