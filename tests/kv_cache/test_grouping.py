# SPDX-License-Identifier: Apache-2.0
"""Tests of the layers that share a block table, and of the unused part of their blocks."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kv_cache.grouping import MAX_GROUPS, group_layers, request_bytes
from quire.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    fit_states,
    tensor_block_bytes,
)
from tests.fixtures.folded import folded

FULL = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(16, num_kv_heads=2, head_size=8, dtype_bytes=4, sliding_window=32)
STATE = RecurrentStateSpec(16, state_bytes=4096)


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


def sizes(specs: dict[str, KVCacheSpec]) -> list[tuple[str, int]]:
    return [
        (type(g.spec).__name__.removesuffix("Spec"), len(g.layer_names)) for g in group_layers(specs, 4096)
    ]


def test_one_kind_is_one_group_even_if_its_layers_differ_in_size() -> None:
    wide = dataclasses.replace(FULL, num_kv_heads=3)
    specs = layers(FULL, wide, FULL)
    (group,) = group_layers(specs, 4096)
    assert group.layer_names == tuple(specs)
    assert tensor_block_bytes((group,), specs) == tuple(spec.block_bytes for spec in specs.values())
    assert KVCacheConfig(5, (group,), specs).parts_per_block(group) == group.spec.planes == 2


@folded(
    ("num_windows", "num_full", "expected"),
    [
        (2, 2, [("FullAttention", 2), ("SlidingWindow", 2)]),
        (2, 1, [("FullAttention", 1), ("SlidingWindow", 1), ("SlidingWindow", 1)]),
        (15, 3, [("FullAttention", 3), *[("SlidingWindow", 3)] * 5]),
        # Gemma 3 1B, 4B and 27B: the last group of windowed layers is not full.
        (22, 4, [("FullAttention", 4), *[("SlidingWindow", 4)] * 5, ("SlidingWindow", 2)]),
        (29, 5, [("FullAttention", 5), *[("SlidingWindow", 5)] * 5, ("SlidingWindow", 4)]),
        (52, 10, [("FullAttention", 10), *[("SlidingWindow", 10)] * 5, ("SlidingWindow", 2)]),
    ],
)
def test_groups_of_known_models(num_windows: int, num_full: int, expected: list[tuple[str, int]]) -> None:
    assert sizes(layers(*[WINDOW] * num_windows, *[FULL] * num_full)) == expected


def test_layers_with_other_windows_are_another_kind() -> None:
    other = dataclasses.replace(WINDOW, sliding_window=64)
    assert sizes(layers(other, WINDOW, STATE, FULL)) == [
        ("FullAttention", 1),
        ("SlidingWindow", 1),
        ("SlidingWindow", 1),
        ("RecurrentState", 1),
    ]


def test_parts_per_block_follow_the_widest_layer() -> None:
    wide = dataclasses.replace(WINDOW, num_kv_heads=4)
    specs = layers(FULL, wide)
    config = KVCacheConfig(5, group_layers(specs, 4096), specs)
    assert config.tensor_block_bytes == (wide.block_bytes,)
    assert [config.parts_per_block(group) for group in config.groups] == [4, 2]
    assert request_bytes(config.groups, specs, 1600) == (100 + 3) * wide.block_bytes


def test_blocks_that_are_too_different_are_not_shared() -> None:
    """5 and 7 heads would share blocks of 35, and a request of 160 tokens hold 13 of them in place of 10 of 12."""
    specs = layers(dataclasses.replace(FULL, num_kv_heads=5), dataclasses.replace(WINDOW, num_kv_heads=7))
    (group,) = group_layers(specs, 160)
    assert isinstance(group.spec, FullAttentionSpec)


def test_windows_as_long_as_requests_need_no_groups_of_their_own() -> None:
    assert len(group_layers(layers(FULL, WINDOW), 32)) == 1
    assert len(group_layers(layers(FULL, WINDOW), 320)) == 2


def test_without_hybrid_groups_all_attention_is_full() -> None:
    specs = layers(WINDOW, FULL, WINDOW)
    (group,) = group_layers(specs, 4096, hybrid=False)
    assert (group.layer_names, group.spec.first_block(1000)) == (tuple(specs), 0)
    with pytest.raises(ConfigError, match="attention layers only"):
        group_layers(layers(WINDOW, STATE), 4096, hybrid=False)


def test_layers_must_agree_on_the_block_size() -> None:
    with pytest.raises(ConfigError, match=r"\[8, 16\]"):
        group_layers(layers(FULL, dataclasses.replace(FULL, block_size=8)), 4096)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5_000_000), st.integers(1, 64))
def test_blocks_have_the_size_of_the_states_in_them(
    heads: int, other_heads: int, state_bytes: int, checkpoint_blocks: int
) -> None:
    """However unlike their sizes are, no layer's block is larger than a state and the blocks of attention before it."""
    state = RecurrentStateSpec(16, state_bytes, checkpoint_blocks)
    full, window = (
        dataclasses.replace(FULL, num_kv_heads=heads),
        dataclasses.replace(WINDOW, num_kv_heads=heads),
    )
    other = dataclasses.replace(FULL, num_kv_heads=other_heads)
    specs = layers(state, full, window, dataclasses.replace(state, state_bytes=1 + state_bytes // 2), other)
    fitted = fit_states(specs)
    unit = math.lcm(full.block_bytes, other.block_bytes)
    (block_bytes,) = set(tensor_block_bytes(group_layers(fitted, 4096), fitted))
    assert state_bytes <= block_bytes < state_bytes + unit
    for name, spec in specs.items():
        now, tokens = fitted[name], fitted[name].block_size
        assert tokens == 16 * block_bytes // unit
        if isinstance(now, RecurrentStateSpec):
            assert now.state_bytes == block_bytes
            assert now.checkpoint_blocks == max(checkpoint_blocks * 16 // tokens, 1)
        else:
            assert (now.kernel_block_size, now.plane_bytes) == (16, spec.block_bytes // 2)


def test_layers_of_one_sort_need_no_fitting() -> None:
    for specs in (layers(FULL, WINDOW), layers(STATE, dataclasses.replace(STATE, state_bytes=64))):
        assert fit_states(specs) == specs


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.integers(1, 2000))
def test_no_other_grouping_takes_less_memory(
    num_windows: int, num_full: int, heads: int, num_tokens: int
) -> None:
    """Against the sum over layers, in bytes of a single head, for every size of groups and for one group of all."""
    full = dataclasses.replace(FULL, num_kv_heads=heads)
    specs = layers(*[WINDOW] * num_windows, *[full] * num_full)
    groups = group_layers(specs, num_tokens)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    head = full.block_bytes // heads
    block = head * math.lcm(heads, 2)
    blocks_full, blocks_window = full.max_blocks(num_tokens, 1), WINDOW.max_blocks(num_tokens, 1)
    costs = [blocks_full * (num_windows * 2 + num_full * heads) * head]
    for size in range(1, max(num_windows, num_full) + 1):
        of_full, of_window = -(-num_full // size), -(-num_windows // size)
        if of_full + of_window <= MAX_GROUPS:
            costs.append((of_full * blocks_full + of_window * blocks_window) * size * block)
    assert request_bytes(groups, specs, num_tokens) == min(costs)
