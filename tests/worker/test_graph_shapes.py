# SPDX-License-Identifier: Apache-2.0
"""Tests of the shapes of steps that are captured, and of the shape that a step runs in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.worker.graphs import GraphShape, ShapeTable, decode_sizes, default_sizes, sample_sizes, shapes_of
from tests.worker.harness import tiny_config

LIMITS = {"max_model_len": 64, "max_num_seqs": 100, "max_num_batched_tokens": 300}


def test_default_sizes() -> None:
    assert len(default_sizes(256)) == 35
    assert default_sizes(256)[:5] == (1, 2, 4, 8, 16)
    assert default_sizes(256)[-1] == 256
    assert default_sizes(1) == (1,)
    assert default_sizes(100)[-2:] == (96, 100)
    assert default_sizes(4096)[-2:] == (496, 512)


def test_sizes_of_samples() -> None:
    assert sample_sizes(1) == (1,)
    assert sample_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert sample_sizes(1 << 20)[-2:] == (384, 512)


def test_steps_with_prompts_have_every_64th_size_twice() -> None:
    config = tiny_config(**LIMITS)
    prompts = [shape for shape in shapes_of(config) if not shape.is_decode]
    assert [shape.num_tokens for shape in prompts] == [64, 64, 128, 128, 192, 192, 256, 256]
    assert [shape.num_requests for shape in prompts] == [8, 64, 8, 100, 8, 100, 8, 100]
    assert all(shape.max_query_len == shape.num_tokens for shape in prompts)
    assert [
        shape for shape in shapes_of(tiny_config(**LIMITS, prefill_graph_sizes=[0])) if not shape.is_decode
    ] == []
    assert shapes_of(tiny_config(**LIMITS, enforce_eager=True)) == ()


def test_verified_drafts_have_shapes_for_rows_and_drafts() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 5}
    config = tiny_config(**LIMITS, speculative_config=speculation, prefill_graph_sizes=[0])
    verified = [shape for shape in shapes_of(config) if not shape.is_decode]
    assert {shape.max_query_len for shape in verified} == {2, 3, 5, 6}
    assert all(shape.num_tokens == shape.num_requests * shape.max_query_len for shape in verified)
    assert {shape.num_requests for shape in verified if shape.max_query_len == 6} == {1, 2, 4, 8, 16, 32}
    assert max(shape.num_tokens for shape in verified) <= 300


def test_requested_sizes_are_limited() -> None:
    asked = {"cudagraph_capture_sizes": [3, 200], "prefill_graph_sizes": [7, 4000]}
    config = tiny_config(**LIMITS, **asked)
    assert decode_sizes(config) == (3,)
    assert shapes_of(config) == (GraphShape(3, 3, 1), GraphShape(7, 7, 7))


SHAPES = st.lists(
    st.builds(GraphShape, st.integers(2, 6), st.integers(2, 12), st.integers(2, 12)), max_size=6
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(SHAPES, st.lists(st.integers(1, 6), max_size=4), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_the_smallest_shape_that_holds_a_step(
    shapes: list[GraphShape], decodes: list[int], query_lens: list[int]
) -> None:
    table = ShapeTable([*shapes, *map(GraphShape.decode, decodes)])
    step = len(query_lens), sum(query_lens), max(query_lens)
    found = table.fitting(*step)
    if max(query_lens) == 1:
        holding = [GraphShape.decode(size) for size in decodes if size >= len(query_lens)]
    else:
        holding = [shape for shape in shapes if all(a <= b for a, b in zip(step, shape, strict=True))]
    if found is None:
        assert not holding
    else:
        assert found in holding
        assert found.num_tokens == min(shape.num_tokens for shape in holding)
