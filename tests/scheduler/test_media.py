# SPDX-License-Identifier: Apache-2.0
"""Chunks of prompts with media: where a chunk may end, and that an item as large as a step is computed in the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ValidationError
from quire.media import Prefix, check_media, chunk_end, least_chunk
from quire.scheduler.output import SchedulerOutput
from tests.fixtures.folded import folded
from tests.fixtures.media import item, parts, placed
from tests.scheduler.harness import VOCAB_SIZE, Engine, make_config, run_alone

PROMPT = [n % VOCAB_SIZE for n in range(7, 31)]


def chunks_of(plans: list[SchedulerOutput], name: str) -> list[tuple[int, int]]:
    """[start, end) of each chunk of a request's prompt."""
    return [
        (one.start, one.start + one.num_tokens)
        for plan in plans
        for one in plan.scheduled
        if one.request_id == name and one.start < len(PROMPT)
    ]


@given(parts, st.integers(0, 24), st.integers(0, 24))
def test_chunk_end_is_the_last_place_outside_of_runs(parts: list[Any], start: int, end: int) -> None:
    media, (start, end) = placed(parts, 24), sorted((start, end))
    runs = [run for one in media if one.both_ways for run in one.runs]
    places = [
        place for place in range(start, end + 1) if not any(first < place < last for first, last in runs)
    ]
    assert chunk_end(media, start, end) == max(places, default=start)


def test_a_prefix_is_computed_whole_or_to_its_end() -> None:
    media = [item(0, 4, prefix=Prefix(10, b"")), item(6, 8)]
    assert [chunk_end(media, 0, end) for end in (3, 9, 10, 12)] == [0, 0, 10, 12]
    assert [least_chunk(media, start) for start in (0, 3, 9, 10)] == [10, 7, 1, 1]


def test_equal_beginnings_of_prefixes_are_not_shared() -> None:
    """Values at a prefix's first positions depend on its last ones."""
    engine = Engine(make_config(max_num_batched_tokens=24))
    for name, digest in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        engine.add(name, PROMPT, media=[item(0, 4, prefix=Prefix(len(PROMPT), digest))], max_tokens=1)
        engine.drain()
    assert [engine.requests[name].num_cached_tokens for name in "abc"] == [0, 0, 20]


@pytest.mark.parametrize(("length", "words"), [(3, "must hold all media"), (40, "within the prompt's 24")])
def test_a_prefix_outside_its_bounds_is_refused(length: int, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        check_media([item(0, 4, prefix=Prefix(length, b""))], 24, 24)


def test_a_prefix_larger_than_a_step_is_refused() -> None:
    with pytest.raises(ValidationError, match="the prompt with its images takes 24 tokens"):
        check_media([item(0, 4, prefix=Prefix(24, b""))], 24, 16)


@given(parts, st.integers(0, 23))
def test_least_chunk_is_the_shortest_that_may_end(parts: list[Any], start: int) -> None:
    media = placed(parts, 24)
    ends = (end for end in range(start + 1, 25) if chunk_end(media, start, end) == end)
    assert least_chunk(media, start) == next(ends) - start


@pytest.mark.parametrize(
    ("both_ways", "chunks"),
    [(False, [(0, 8), (8, 16), (16, 24)]), (True, [(0, 5), (5, 13), (13, 21), (21, 24)])],
)
def test_chunk_ends_before_an_item_both_ways(both_ways: bool, chunks: list[tuple[int, int]]) -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    engine.add("a", PROMPT, media=[item(5, 13, both_ways=both_ways)])
    engine.drain()
    assert chunks_of(engine.plans, "a") == chunks


def test_cap_of_long_prompts_lets_an_item_through_whole() -> None:
    engine = Engine(make_config(max_num_batched_tokens=16, long_prefill_token_threshold=3))
    engine.add("first", [1, 2], max_tokens=40)
    engine.step()
    engine.add("a", PROMPT, media=[item(4, 12, both_ways=True)])
    engine.drain()
    assert chunks_of(engine.plans, "a")[:3] == [(0, 3), (3, 4), (4, 12)]


def test_prompt_without_chunks_is_computed_whole() -> None:
    engine = Engine(make_config(max_num_batched_tokens=24, enable_chunked_prefill=False))
    engine.add("first", [1, 2], max_tokens=3)
    engine.step()
    engine.add("a", PROMPT, media=[item(4, 12, both_ways=True)])
    engine.drain()
    assert chunks_of(engine.plans, "a") == [(0, 24)]


@pytest.mark.parametrize("async_steps", [1, 3])
def test_item_as_large_as_a_step_gets_a_step_of_its_own(async_steps: int) -> None:
    """Streams that would leave it no room sit out one step, long before they end."""
    engine = Engine(make_config(max_num_batched_tokens=8, max_num_seqs=4))
    for name in "bcd"[:async_steps]:
        engine.add(name, [1, 2], max_tokens=40)
    engine.step()
    engine.add("a", PROMPT, media=[item(3, 11, both_ways=True)])
    for _ in range(12):
        engine.step()
    assert (3, 11) in chunks_of(engine.plans, "a")
    assert not engine.requests["b"].is_finished
    engine.drain()
    assert engine.tokens("a") == run_alone(engine.requests["a"], engine.config).new_token_ids


def test_waiting_prompt_that_begins_with_an_item_starts() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    engine.add("b", [1, 2], max_tokens=40)
    engine.step()
    engine.add("a", PROMPT, media=[item(0, 8, both_ways=True)])
    for _ in range(8):
        engine.step()
    assert chunks_of(engine.plans, "a")[0] == (0, 8)
    assert not engine.requests["b"].is_finished


def test_hit_inside_an_item_computes_the_rest_of_it_whole() -> None:
    """The blocks before were computed with all of the item in view."""
    engine = Engine(make_config(max_num_batched_tokens=16))
    media = [item(2, 14, both_ways=True)]
    engine.add("a", PROMPT[:15], media=media, max_tokens=1)
    engine.drain()
    engine.add("b", PROMPT, media=media, max_tokens=1)
    engine.drain()
    assert engine.requests["b"].num_cached_tokens == 12
    assert chunks_of(engine.plans, "b") == [(12, 24)]


@pytest.mark.parametrize(("content", "num_cached"), [(0, 20), (1, 4)])
def test_prefix_is_shared_by_equal_contents_only(content: int, num_cached: int) -> None:
    engine = Engine(make_config(max_num_batched_tokens=24))
    engine.add("a", PROMPT, media=[item(5, 9)], max_tokens=1)
    engine.drain()
    engine.add("b", PROMPT, media=[item(5, 9, content)], max_tokens=1)
    engine.drain()
    assert engine.requests["b"].num_cached_tokens == num_cached


@folded(
    ("media", "problem"),
    [
        ([item(0, 25)], "positions 0 to 25"),
        ([item(4, 8), item(7, 9)], "item 1 of the prompt's media fills positions 7 to 9"),
        ([item(-1, 3)], "positions -1 to 3"),
        ([item(3, 3)], "positions 3 to 3"),
        ([item(3, 6, runs=[])], "no positions that take embeddings"),
        ([item(3, 6, runs=[(2, 4)])], "run of embeddings at 2 to 4"),
        ([item(3, 6, runs=[(5, 6), (3, 4)])], "run of embeddings at 3 to 4"),
        ([item(3, 6, digest=b"short")], "digest of 5 bytes"),
        ([item(3, 6, kind="smell")], "kind 'smell'; kinds are image, video, audio, embeds"),
        ([item(0, 3), item(4, 6)], "takes 2 embeddings, and the same content before takes 3"),
        ([item(0, 17, both_ways=True)], "takes 17 tokens, .* a step takes 16: .*--max-num-batched-tokens"),
    ],
)
def test_malformed_media_are_refused_with_a_message(media: list[Any], problem: str) -> None:
    engine = Engine(make_config(max_num_batched_tokens=16))
    with pytest.raises(ValidationError, match=problem):
        engine.add("a", PROMPT, media=media)
    engine.drain()
