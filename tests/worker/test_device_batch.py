# SPDX-License-Identifier: Apache-2.0
"""The rows on a device and the inputs made there, against the host's gather."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata
from quire.kv_cache.spec import FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec
from quire.media import MediaItem
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest
from quire.worker.gpu import DeviceBatch
from quire.worker.graphs import GraphShape
from quire.worker.input_batch import BlockTable, InputBatch
from quire.worker.inputs import StepLayout, gather_inputs, lay_out
from quire.worker.media_rows import Embeddings, MediaBatch
from tests.worker.fake_gpu import FakeGpu
from tests.worker.harness import scheduled

MAX_SEQS, MAX_LEN, POOL = 6, 600, 900
WIDE = GraphShape(MAX_SEQS, (MAX_LEN + 7) * MAX_SEQS, MAX_LEN + 7)
SPECS = (FullAttentionSpec(4, 1, 1, 4), SlidingWindowSpec(16, 1, 1, 4, 40), RecurrentStateSpec(32, 64))


class Rows:
    """A host batch with three groups, its copy on a device, and requests whose tokens only the device knows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        tables = tuple(BlockTable(MAX_SEQS, MAX_LEN, spec, POOL) for spec in SPECS)
        self.batch = InputBatch(MAX_SEQS, MAX_LEN, tables)
        self.device = DeviceBatch(self.batch, WIDE.num_tokens, FakeGpu())
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str) -> None:
        length = self.rng.choice([1, 3, 40, 300, 590])
        self.tokens[name] = [self.rng.randrange(1000) for _ in range(length)]
        blocks = [self.blocks(spec.num_blocks(length)) for spec in SPECS]
        computed = self.rng.randrange(length)
        request = NewRequestData(name, self.tokens[name], 1, SamplingParams(), blocks, computed)
        self.batch.add(request)

    def remove(self, name: str) -> None:
        del self.tokens[name]
        self.batch.remove(name)

    def blocks(self, count: int) -> list[int]:
        return self.rng.sample(range(1, POOL), count)

    def step(self, names: list[str], counts: list[int], graph: GraphShape | None = None) -> None:
        """Gather on both sides, compare, and sample; requests that sample have drafts, but where there is no room."""
        planned = scheduled(self.batch, dict(zip(names, counts, strict=True)))
        if graph is None or not graph.is_decode:
            planned = [self.with_drafts(request) for request in planned]
        expected = gather_inputs(self.batch, lay_out(self.batch, planned))
        layout = expected.layout
        got = self.device.gather(layout, graph)
        shape = graph or GraphShape(len(names), layout.num_tokens, layout.max_query_len)
        padding = shape.num_tokens - layout.num_tokens
        assert torch.equal(got.input_ids, padded(expected.input_ids, padding, 0))
        assert torch.equal(got.positions, padded(expected.positions, padding, 0))
        assert torch.equal(got.logits_indices, expected.logits_indices.int())
        for spec, one, other in zip(SPECS, got.step.groups, expected.step.groups, strict=True):
            check(one, other, spec.block_size, shape, layout.max_seq_len if graph is None else MAX_LEN)
        self.sample(layout)
        for name in names:
            row = self.batch.row(name)
            self.tokens[name] = self.batch.token_ids[row, : self.batch.num_tokens[row]].tolist()
            self.grow(name, len(self.tokens[name]), [])

    def with_drafts(self, request: ScheduledRequest) -> ScheduledRequest:
        name, known = request.request_id, len(self.tokens[request.request_id])
        num_drafts = self.rng.choice([0, 0, 1, 7]) if request.num_samples else 0
        if num_drafts == 0 or known + num_drafts > MAX_LEN:
            return request
        drafts = [self.rng.randrange(1000) for _ in range(num_drafts)]
        self.grow(name, known + num_drafts, drafts)
        return ScheduledRequest(
            name, request.start, request.num_tokens + num_drafts, 1 + num_drafts, [], drafts
        )

    def sample(self, layout: StepLayout) -> None:
        """Any number of drafts turns out to be right."""
        samples = layout.samples
        codes = torch.tensor([self.rng.choice([5, 700, -1, -2]) for _ in samples.rows], dtype=torch.int64)
        self.device.keep(codes)
        # The host's rows stay without them for the device's gather, and get them for its oracle.
        self.batch.advance(
            layout.rows, layout.ends - (layout.num_samples - 1).clip(0), layout.num_samples == 1
        )
        places = self.batch.places(samples)
        self.batch.set_tokens(places, codes.clamp(min=0).numpy())
        drafted = layout.num_samples > 1
        num_kept = np.array([self.rng.randint(1, count) for count in layout.num_samples[drafted]], dtype=int)
        first = (layout.num_samples.cumsum() - layout.num_samples)[drafted]
        self.batch.keep(places.at(first), num_kept)

    def grow(self, name: str, num_tokens: int, drafts: list[int]) -> None:
        """Blocks for so many tokens, and drafts behind those that there are."""
        row = self.batch.row(name)
        new = []
        for table in self.batch.block_tables:
            missing = -(-num_tokens // table.block_size) - int(table.num_blocks[row])
            new.append(self.blocks(max(missing, 0)))
        start = int(self.batch.num_computed_tokens[row])
        self.batch.grow(ScheduledRequest(name, start, 1, 1 + len(drafts), new, drafts))


def padded(tensor: Tensor, count: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, count), value=value)


def check(got: GroupMetadata, want: GroupMetadata, size: int, shape: GraphShape, longest: int) -> None:
    assert type(got) is type(want)
    num_requests = len(want.seq_lens)
    padding = shape.num_requests - num_requests
    assert torch.equal(got.seq_lens, padded(want.seq_lens, padding, 0))
    starts = want.query_start_loc.tolist()
    if isinstance(got, AttentionMetadata) and isinstance(want, AttentionMetadata):
        assert torch.equal(got.slot_mapping, padded(want.slot_mapping, shape.num_tokens - starts[-1], -1))
    more = range(num_requests + 1, num_requests + padding + 1) if shape.is_decode else [starts[-1]] * padding
    assert got.query_start_loc.tolist() == [*starts, *more]
    assert (got.max_query_len, got.max_seq_len) == (shape.max_query_len, longest)
    for index, length in enumerate(want.seq_lens.tolist()):
        used = -(-length // size)
        assert torch.equal(got.block_tables[index, :used], want.block_tables[index, :used])


@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("aaargGdD"), min_size=3, max_size=12))
def test_gather_is_the_hosts(seed: int, actions: list[str]) -> None:
    """a: add, r: remove, g: any step, d: a step of one token each, G, D: the same for a graph."""
    rng = random.Random(seed)
    rows = Rows(rng)
    for number, action in enumerate(actions):
        if action == "a" and len(rows.tokens) < MAX_SEQS:
            rows.add(f"r{number}")
        known = [name for name in rows.tokens if len(rows.tokens[name]) < MAX_LEN]
        picked = rng.sample(known, rng.randint(1, len(known))) if known else []
        if not picked:
            continue
        if action == "r":
            rows.remove(picked[0])
        elif action in "dD":
            rows.step(picked, [1] * len(picked), GraphShape.decode(MAX_SEQS) if action == "D" else None)
        else:
            pending = [
                len(rows.tokens[name]) - int(rows.batch.num_computed_tokens[rows.batch.row(name)])
                for name in picked
            ]
            counts = [rng.randint(1, count) for count in pending]
            rows.step(picked, counts, WIDE if action == "G" else None)


def test_a_row_that_changes_hands_is_uploaded_whole() -> None:
    rows = Rows(random.Random(0))
    for name in ("a", "b"):
        rows.add(name)
        rows.step([name], [1])
        rows.remove(name)


def test_a_step_is_one_upload() -> None:
    gpu = FakeGpu()
    rows = Rows(random.Random(0))
    rows.device._transfers = gpu
    rows.add("a")
    rows.add("b")
    rows.step(["a", "b"], [1, 1])
    rows.step(["b", "a"], [1, 1])
    assert gpu.num_uploads == 2


@pytest.mark.parametrize("shape", [GraphShape.decode(4), GraphShape(3, 8, 5)])
def test_a_blank_step_is_padding(shape: GraphShape) -> None:
    rows = Rows(random.Random(0))
    rows.add("a")
    rows.step(["a"], [1])
    rows.device.blank(shape)
    ids, positions, step = rows.device.fixed_inputs(shape)
    metadata = step.metadata(0, AttentionMetadata)
    assert ids.tolist() == positions.tolist() == [0] * shape.num_tokens
    assert metadata.seq_lens.tolist() == [0] * shape.num_requests
    assert metadata.slot_mapping.tolist() == [-1] * shape.num_tokens
    starts = range(5) if shape.is_decode else [0] * 4
    assert metadata.query_start_loc.tolist() == [*starts]
    assert (metadata.max_query_len, metadata.max_seq_len) == (shape.max_query_len, MAX_LEN)


@pytest.mark.parametrize("graph", [None, GraphShape.decode(4), GraphShape(4, 600, 600)])
def test_addresses_stay(graph: GraphShape | None) -> None:
    rows = Rows(random.Random(0))
    before = [tensor.data_ptr() for tensor in rows.device.fixed_inputs(GraphShape.decode(4))[:2]]
    rows.add("a")
    rows.step(["a"], [1], graph)
    assert [tensor.data_ptr() for tensor in rows.device.fixed_inputs(GraphShape.decode(4))[:2]] == before


class Numbers:
    """Embeddings of one item."""

    def embeddings(self, digest: bytes) -> Embeddings | None:
        return Embeddings(torch.arange(12.0).view(4, 3), (torch.ones(4, 3),))


def test_gather_of_media_is_the_hosts() -> None:
    """A step inside an item, one with a request behind its item, and a graph's step with its delta."""
    media = MediaBatch(
        Numbers(), MAX_SEQS, hidden_size=3, num_deepstack=1, has_axes=True, max_position=MAX_LEN
    )
    tables = tuple(BlockTable(MAX_SEQS, MAX_LEN, spec, POOL) for spec in SPECS)
    batch = InputBatch(MAX_SEQS, MAX_LEN, tables, media=media)
    device = DeviceBatch(batch, WIDE.num_tokens, FakeGpu())
    item = MediaItem(b"i", "image", 2, 6, [(2, 6)], "", (1, 2, 2), both_ways=True)
    for name, items, done in (("seen", [item], 9), ("seeing", [item], 0), ("text", [], 3)):
        blocks = [list(range(1, 1 + spec.num_blocks(10))) for spec in SPECS]
        batch.add(NewRequestData(name, [*range(10)], 10, SamplingParams(), blocks, done, media=items))
    for counts, graph in (
        ({"seen": 1, "text": 3}, None),
        ({"seen": 1, "text": 1}, GraphShape(4, 4, 1)),
        ({"text": 2, "seeing": 7, "seen": 1}, None),
    ):
        want = gather_inputs(batch, lay_out(batch, scheduled(batch, counts)))
        assert device.is_unlike_graphs(want.layout) == ("seeing" in counts)
        got = device.gather(want.layout, graph)
        padding = 0 if graph is None else graph.num_tokens - want.layout.num_tokens
        assert torch.equal(got.positions, padded(want.positions, padding, 0))
        assert (got.step.media is None) == (want.step.media is None)
        if want.step.media is None or got.step.media is None:
            continue
        assert torch.equal(got.step.media.rows, want.step.media.rows)
        assert torch.equal(got.step.media.values, want.step.media.values)
        assert torch.equal(got.step.media.deepstack[0], want.step.media.deepstack[0])
        assert got.step.rope_positions is not None
        assert want.step.rope_positions is not None
        assert torch.equal(got.step.rope_positions, want.step.rope_positions)
        for one, other in zip(got.step.groups[:2], want.step.groups[:2], strict=True):
            assert isinstance(one, AttentionMetadata)
            assert isinstance(other, AttentionMetadata)
            assert one.last_seen is not None
            assert other.last_seen is not None
            assert torch.equal(one.last_seen, other.last_seen)
