# SPDX-License-Identifier: Apache-2.0
"""The place of a layer's states in the cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.kernels.attention_metadata import AttentionMetadata, StateMetadata
from quire.kv_cache.spec import FullAttentionSpec, RecurrentStateSpec
from quire.layers.states import ALIGNMENT, StateCache
from quire.layers.step import StepContext
from tests.worker.harness import tiny_config

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return tiny_config()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(SHAPES)
def test_parts_share_a_block_and_nothing_else(config: EngineConfig, shapes: list[tuple[int, ...]]) -> None:
    cache = StateCache(config=config, name="states", parts=shapes)
    spec = cache.kv_cache_spec()
    tensor = torch.full((3, spec.block_bytes), 255, dtype=torch.uint8)
    cache.bind(0, spec, tensor)
    for number, (view, shape) in enumerate(zip(cache.views, shapes, strict=True)):
        assert view.shape == (3, *shape)
        assert (view.data_ptr() - tensor.data_ptr()) % ALIGNMENT == 0
        assert view.isnan().all(), "nobody else has written there"
        view[1] = number
    assert (tensor[[0, 2]] == 255).all()


def test_a_layer_gets_the_states_of_its_group(config: EngineConfig) -> None:
    cache = StateCache(config=config, name="states", parts=[(2, 3)])
    shared = (torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[1]]), 1, 1)
    step = StepContext((AttentionMetadata(*shared, torch.tensor([4])), StateMetadata(*shared, 4)))
    cache.bind(1, cache.kv_cache_spec(), torch.zeros(2, 64, dtype=torch.uint8))
    assert cache.metadata(step) is step.groups[1]
    with pytest.raises(AssertionError, match="no place in FullAttentionSpec"):
        cache.bind(1, FullAttentionSpec(4, 1, 4, 4), torch.zeros(2, 128, dtype=torch.uint8))


@pytest.mark.parametrize(("block_size", "blocks"), [(16, 32), (100, 5), (1024, 1)])
def test_state_checkpoint_distance(config: EngineConfig, block_size: int, blocks: int) -> None:
    spec = StateCache(
        config=config.evolve(block_size=block_size), name="states", parts=[(4,)]
    ).kv_cache_spec()
    assert spec == RecurrentStateSpec(block_size, 64, checkpoint_blocks=blocks)


def test_a_long_request_holds_no_more_states_than_a_short_one(config: EngineConfig) -> None:
    """While it is decoded, and while its prompt is computed in chunks of 2048."""
    cache = StateCache(config=config.evolve(block_size=16), name="states", parts=[(3, 64), (16, 64)])
    spec = cache.kv_cache_spec()
    assert [spec.max_blocks(num_tokens, 1) for num_tokens in (1, 512, 32768)] == [1, 3, 3]
    assert spec.max_blocks(4096, 2048) == spec.max_blocks(32768, 2048) == 2048 // 512 + 3
