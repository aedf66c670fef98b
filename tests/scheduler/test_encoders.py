# SPDX-License-Identifier: Apache-2.0
"""Encoders: texts are computed whole, many in a step, and hold no blocks; the null executor refuses any other plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.spec import NULL_BLOCK_ID
from quire.pooling_params import PoolingParams
from tests.fixtures.asserts import about_an_assert
from tests.scheduler.harness import Engine, make_config, make_kv_config
from tests.scheduler.test_pooling import chunks, pooled_alone

POOLED = {"pooling_params": PoolingParams()}
WHOLE = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "num_gpu_blocks_override": 1}


def make_engine(**changes) -> Engine:
    return Engine(make_config(**WHOLE | changes), kinds=("encoder 64",))


def test_a_step_takes_the_texts_that_fit_it_whole():
    engine = make_engine(max_num_batched_tokens=64)
    for name, length in {"a": 30, "b": 20, "c": 20, "d": 5}.items():
        engine.add(name, range(length), **POOLED)
    plans = [chunks(engine.step()) for _ in range(2)]
    assert plans == [[(0, 30, 0, True), (0, 20, 0, True)], [(0, 20, 0, True), (0, 5, 0, True)]]
    engine.drain()


def test_no_text_holds_a_block():
    engine = make_engine(max_num_batched_tokens=64)
    engine.add("a", range(64), **POOLED)
    assert engine.step().new_requests[0].block_ids == [[NULL_BLOCK_ID]]
    assert engine.last("a").pooled == pooled_alone(range(64))
    engine.drain()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), min_size=1, max_size=12),
    together=st.integers(1, 4),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_texts_are_pooled_as_if_alone(policy, lengths, together):
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=together, scheduling_policy=policy)
    for number, (length, priority) in enumerate(lengths):
        engine.add(str(number), range(number, number + length), priority=priority, **POOLED)
    engine.drain()
    for number, (length, _) in enumerate(lengths):
        assert engine.last(str(number)).pooled == pooled_alone_whole(range(number, number + length))


def pooled_alone_whole(prompt):
    engine = make_engine(max_num_batched_tokens=64)
    engine.add("alone", prompt, **POOLED)
    engine.drain()
    return engine.last("alone").pooled


@about_an_assert
def test_a_plan_that_cuts_a_text_is_refused():
    engine = Engine(make_config(num_gpu_blocks_override=1), kinds=("encoder 64",))
    engine.add("a", range(20), **POOLED)
    with pytest.raises(AssertionError, match="of 20 tokens, which an encoder computes whole"):
        engine.step()


def test_its_cache_is_the_null_block():
    assert make_kv_config(make_config(**WHOLE), kinds=("encoder 64",)).bytes == 0
