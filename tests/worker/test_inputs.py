# SPDX-License-Identifier: Apache-2.0
"""The persistent batch and the gather, against a dictionary of lists and a loop over tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineError
from quire.kernels.attention_metadata import AttentionMetadata
from quire.scheduler.output import ScheduledRequest
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, gather_inputs, lay_out
from tests.fixtures.folded import folded
from tests.worker.harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    append_tokens,
    input_batch,
    next_samples,
    request,
    rows_of,
    scheduled,
)


class PlainRequest:
    """Expected state of one request in the batch."""

    def __init__(self, rng: random.Random, request_id: str) -> None:
        self.request_id = request_id
        self.tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        self.num_prompt_tokens = rng.randint(1, len(self.tokens))
        self.num_computed_tokens = rng.randrange(len(self.tokens))
        self.blocks = rng.sample(range(1, NUM_BLOCKS), -(-len(self.tokens) // BLOCK_SIZE))


def add(batch: InputBatch, plain: PlainRequest) -> None:
    batch.add(
        request(
            plain.tokens[: plain.num_prompt_tokens],
            request_id=plain.request_id,
            output=plain.tokens[plain.num_prompt_tokens :],
            block_ids=plain.blocks,
            num_computed_tokens=plain.num_computed_tokens,
        )
    )


def sample_token(batch: InputBatch, plain: PlainRequest, token: int) -> None:
    """Apply a step that computed all tokens and sampled this one, to the batch and to the plain request."""
    row = batch.row(plain.request_id)
    plain.num_computed_tokens = len(plain.tokens)
    plain.tokens.append(token)
    new_blocks = (
        [[token % (NUM_BLOCKS - 1) + 1]] if len(plain.tokens) > len(plain.blocks) * BLOCK_SIZE else [[]]
    )
    plain.blocks += new_blocks[0]
    append_tokens(batch, rows_of(row), rows_of(token))
    batch.grow(ScheduledRequest(plain.request_id, plain.num_computed_tokens, 1, 1, new_blocks))


def check_gather(inputs: StepInputs, requests: list[PlainRequest], counts: list[int]) -> None:
    """The slow way: token by token."""
    ids, positions, slots, starts, samples = [], [], [], [0], []
    for index, (plain, count) in enumerate(zip(requests, counts, strict=True)):
        for position in range(plain.num_computed_tokens, plain.num_computed_tokens + count):
            ids.append(plain.tokens[position])
            positions.append(position)
            slots.append(plain.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        if plain.num_computed_tokens + count == len(plain.tokens):
            samples.append(index)
    lengths = [plain.num_computed_tokens + count for plain, count in zip(requests, counts, strict=True)]
    meta = inputs.step.metadata(0, AttentionMetadata)
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert meta.slot_mapping.tolist() == slots
    assert meta.query_start_loc.tolist() == inputs.layout.query_start_loc.tolist() == starts
    assert meta.seq_lens.tolist() == lengths
    assert (meta.max_seq_len, meta.max_query_len) == (max(lengths), max(counts))
    assert inputs.layout.sampling.tolist() == samples
    assert inputs.logits_indices.tolist() == [starts[index + 1] - 1 for index in samples]
    for table, plain, length in zip(meta.block_tables.tolist(), requests, lengths, strict=True):
        needed = -(-length // BLOCK_SIZE)
        assert table[:needed] == plain.blocks[:needed]
    dtypes = [t.dtype for t in (inputs.input_ids, inputs.positions, meta.slot_mapping)]
    assert dtypes == [torch.int64] * 3
    assert {t.dtype for t in (meta.query_start_loc, meta.seq_lens, meta.block_tables)} == {torch.int32}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("aarsg"), max_size=30))
def test_gather_equals_a_loop_over_tokens(seed: int, actions: list[str]) -> None:
    """a: add, r: remove, s: sample a token, g: gather some rows in any order."""
    rng = random.Random(seed)
    batch = input_batch()
    known: dict[str, PlainRequest] = {}
    for number, action in enumerate([*actions, "g"]):
        if action == "a" and len(known) < batch.max_num_seqs:
            known[f"r{number}"] = PlainRequest(rng, f"r{number}")
            add(batch, known[f"r{number}"])
        if not known:
            continue
        picked = rng.sample(sorted(known), rng.randint(1, len(known)))
        if action == "r":
            del known[picked[0]]
            batch.remove(picked[0])
        elif action == "s":
            sample_token(batch, known[picked[0]], rng.randrange(1000))
        elif action == "g":
            requests = [known[request_id] for request_id in picked]
            counts = [rng.randint(1, len(plain.tokens) - plain.num_computed_tokens) for plain in requests]
            layout = lay_out(batch, scheduled(batch, dict(zip(picked, counts, strict=True))))
            check_gather(gather_inputs(batch, layout), requests, counts)
    assert len(batch) == len(known)


def test_a_row_is_for_life() -> None:
    batch = input_batch(max_num_seqs=3)
    rows = [batch.add(request([1, 2], request_id=name)) for name in "abc"]
    assert batch.remove("b") == rows[1]
    assert (batch.row("a"), batch.row("c")) == (rows[0], rows[2])
    assert batch.add(request([3], request_id="d")) == rows[1]
    assert batch.num_tokens[rows[1]] == 1


def test_batch_refuses_contradictions() -> None:
    batch = input_batch(max_num_seqs=1)
    batch.add(request([1], request_id="a"))
    with pytest.raises(EngineError, match="never seen has no row"):
        batch.remove("never seen")
    with pytest.raises(EngineError, match="already has a row"):
        batch.add(request([1], request_id="a"))
    with pytest.raises(EngineError, match="more than max_num_seqs"):
        batch.add(request([1], request_id="b"))
    with pytest.raises(EngineError, match="b has no row"):
        batch.row("b")


@folded(
    ("start", "num_tokens", "num_samples", "blocks", "message"),
    [
        (0, 4, 1, [1], "differ from the plan"),
        (0, 0, 0, [1], "differ from the plan"),
        (-1, 2, 0, [1], "differ from the plan"),
        (1, 2, 1, [1], "differ from the plan"),
        (0, 3, 0, [1], "differ from the plan"),
        (0, 2, 1, [1], "differ from the plan"),
        (0, 3, 2, [1], "differ from the plan"),
        (0, 3, 1, [], "no KV cache blocks"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(
    start: int, num_tokens: int, num_samples: int, blocks: list[int], message: str
) -> None:
    batch = input_batch()
    batch.add(request([1, 2, 3], request_id="good", block_ids=[2]))
    batch.add(request([1, 2, 3], request_id="bad", block_ids=blocks))
    good = ScheduledRequest("good", 0, 3, 1, [])
    with pytest.raises(EngineError, match=f"'bad'.*{message}"):
        lay_out(batch, [good, ScheduledRequest("bad", start, num_tokens, num_samples, [])])


@pytest.mark.parametrize(
    "scheduled",
    [
        ScheduledRequest("r", 2, 3, 2, [], [5, 6]),
        ScheduledRequest("r", 2, 1, 2, []),
        ScheduledRequest("r", 2, 1, 1, [], [5]),
        ScheduledRequest("r", 2, 63, 63, [], [5] * 62),
    ],
)
def test_drafts_are_those_that_are_to_be_sampled(scheduled: ScheduledRequest) -> None:
    batch = input_batch()
    batch.add(request([1, 2, 3], block_ids=[2], num_computed_tokens=2))
    with pytest.raises(EngineError, match=r"request r: .* drafts after 3 tokens"):
        batch.grow(scheduled)


@folded("rolls_back", [True, False])
@folded("num_kept", [1, 2, 4])
def test_row_keeps_accepted_drafts(rolls_back: bool, num_kept: int) -> None:
    batch = input_batch(rolls_back=rolls_back)
    batch.add(request([1, 2, 3], block_ids=[2, 3], num_computed_tokens=2))
    batch.grow(ScheduledRequest("r", 2, 4, 4, [], [5, 6, 7]))
    layout = lay_out(batch, [ScheduledRequest("r", 2, 4, 4, [], [5, 6, 7])])
    assert gather_inputs(batch, layout).input_ids.tolist() == [3, 5, 6, 7]
    assert layout.samples.columns.tolist() == [3, 4, 5, 6]
    batch.advance(layout.rows, layout.ends - layout.num_drafts, layout.num_samples == 1)
    assert (batch.num_tokens[0], batch.num_computed_tokens[0]) == (3, 3)
    places = batch.places(layout.samples)
    batch.set_tokens(places, rows_of(5, 6, 8, 9))
    batch.keep(places.at(rows_of(0)), rows_of(num_kept))
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [1, 2, 3, 5, 6, 8, 9][: 3 + num_kept]
    assert batch.num_computed_tokens[0] == (2 + num_kept if rolls_back else 3)


def test_a_row_that_changed_hands_keeps_nothing() -> None:
    batch = input_batch(max_num_seqs=1)
    batch.add(request([1, 2, 3], block_ids=[2]))
    places = batch.places(next_samples(batch, rows_of(0)))
    batch.remove("r")
    batch.add(request([4], request_id="other", block_ids=[2]))
    batch.set_tokens(places, rows_of(9))
    batch.keep(places, rows_of(1))
    assert (batch.num_tokens[0], batch.num_computed_tokens[0], batch.token_ids[0, 3]) == (1, 0, 0)


def test_context_can_be_full() -> None:
    batch = input_batch(max_model_len=4)
    batch.add(request([1, 2, 3, 4], block_ids=[1]))
    append_tokens(batch, rows_of(0), rows_of(5))
    assert batch.num_tokens[0] == 5
