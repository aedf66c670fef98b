# SPDX-License-Identifier: Apache-2.0
"""Tests of the cache's size, and of the errors when it is too small."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.errors import ConfigError
from quire.kv_cache.sizing import (
    blocks_per_request,
    largest_model_len,
    resolve_max_model_len,
    size_kv_cache,
)
from quire.kv_cache.spec import (
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVMemory,
    SlidingWindowSpec,
    SwapCosts,
)

FULL = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(16, num_kv_heads=2, head_size=8, dtype_bytes=4, sliding_window=32)
BLOCK = FULL.block_bytes
PLENTY = KVMemory(10**9, "as much as a test has")


def make_config(**args: Any) -> EngineConfig:
    return EngineConfig.from_args(
        **{"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64} | args
    )


def sized(memory: KVMemory = PLENTY, **args: Any) -> KVCacheConfig:
    return size_kv_cache(make_config(**args), {"a": FULL, "b": FULL}, memory)


def test_the_least_bound_counts_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    useful = 4 * 4 + 1  # max_num_seqs * max_model_len / block_size, and the null block
    assert sized().num_blocks == useful
    assert "all that 4 requests of 64 tokens can use" in caplog.text
    assert sized(KVMemory(2 * BLOCK * 9 + 5, "what is left")).num_blocks == 9
    assert "what is left" in caplog.text
    assert sized(KVMemory(10**9, "", default_bytes=2 * BLOCK * 7)).num_blocks == 7
    assert "half of the free memory" in caplog.text


def test_pooled_token_states_take_their_part_of_memory() -> None:
    """Four requests of 64 tokens, and 8 float32 numbers of each: 16 tokens to a block."""
    spec = PoolingSpec(("embed", "token_embed"), "last", 8)
    memory = KVMemory(9 * (2 * BLOCK + 16 * 8 * 4), "")
    specs = {"a": FULL, "b": FULL}

    def blocks(spec: PoolingSpec | None, **args: Any) -> int:
        config = dataclasses.replace(make_config(**{"device": "cpu"} | args), pooling=spec)
        return size_kv_cache(config, specs, memory).num_blocks

    assert blocks(spec) == 9
    assert blocks(None) == blocks(dataclasses.replace(spec, tasks=("embed",))) == 10
    assert blocks(spec, device="cuda") == blocks(spec, enable_chunked_prefill=False) == 10
    windowed = size_kv_cache(
        dataclasses.replace(make_config(device="cpu"), pooling=spec), {"a": WINDOW}, KVMemory(10 * BLOCK, "")
    )
    assert windowed.num_blocks < 10


def test_of_several_stages_the_one_that_needs_most_decides() -> None:
    specs = {"a": FULL, "b": FULL, "c": FULL}
    memory = KVMemory(2 * BLOCK * 9 + 5, "", stages=(("a",), ("b", "c")))
    kv_config = size_kv_cache(make_config(), specs, memory)
    assert kv_config.num_blocks == 9
    assert [kv_config.of_layers(names).bytes for names in memory.stages] == [9 * BLOCK, 18 * BLOCK]


def test_a_stage_without_layers_of_a_group_has_the_group() -> None:
    """Plans have blocks for it."""
    specs = {"a": FULL, "b": WINDOW, "c": FULL, "d": WINDOW}
    memory = KVMemory(10**6, "", stages=(("a", "b"), ("d",)))
    whole = size_kv_cache(make_config(max_model_len=1024), specs, memory)
    part = whole.of_layers(["d"])
    assert [group.layer_names for group in part.groups] == [(), ("d",)]
    assert [group.spec for group in part.groups] == [group.spec for group in whole.groups]
    assert part.tensor_block_bytes == (BLOCK,)
    assert [part.parts_per_block(group) for group in part.groups] == [1, 2]


def test_model_without_cache_gets_no_blocks_and_any_length(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(swap_space=1.0)
    kv_config = size_kv_cache(config, {"a": EncoderOnlySpec(64)}, KVMemory(0, "nothing is left"))
    assert (kv_config.num_blocks, kv_config.bytes, kv_config.num_host_blocks) == (1, 0, 0)
    assert resolve_max_model_len(config, kv_config) is config
    assert "KV cache: none" in caplog.text


def test_the_default_limit_leaves_room_for_one_request() -> None:
    assert sized(KVMemory(10**9, "", default_bytes=1)).num_blocks == 5


def test_requested_size_is_the_size() -> None:
    nothing = KVMemory(0, "")
    assert sized(nothing, kv_cache_memory_bytes=2 * BLOCK * 100 + 1).num_blocks == 100
    assert sized(nothing, num_gpu_blocks_override=77, kv_cache_memory_bytes=1).num_blocks == 77


def test_swap_space_becomes_host_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    costs = SwapCosts(1e9, 1e2)
    kv_config = sized(KVMemory(10**9, "", swap_costs=costs), swap_space=(2 * BLOCK * 5 + 1) / 2**30)
    assert (kv_config.num_host_blocks, kv_config.swap_costs) == (5, costs)
    assert "host tier: 5 blocks" in caplog.text
    assert sized().num_host_blocks == 0


def test_windows_make_groups_unless_switched_off_or_never_left() -> None:
    specs = {"a": FULL, "b": WINDOW}

    def number(**args: Any) -> int:
        return len(size_kv_cache(make_config(**args), specs, PLENTY).groups)

    assert number(max_model_len=640) == 2
    assert number(max_model_len=640, disable_hybrid_kv_cache_manager=True) == 1
    assert number(max_model_len=32) == 1


def test_the_capacity_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolve_max_model_len(make_config(), sized(num_gpu_blocks_override=11))
    assert "KV cache: 11 blocks, 0.0 MiB, 160 tokens: 2.5 requests of 64 tokens at once" in caplog.text


@pytest.mark.item(49)
def test_a_request_that_does_not_fit_is_refused_with_the_numbers() -> None:
    config = make_config(max_model_len=2048)
    kv_config = size_kv_cache(config, {"a": FULL}, KVMemory(BLOCK * 33, ""))
    with pytest.raises(ConfigError) as caught:
        resolve_max_model_len(config, kv_config)
    needed, there = (
        f"128 KV cache blocks ({128 * BLOCK / 2**20:.1f} MiB)",
        f"32 ({32 * BLOCK / 2**20:.1f} MiB)",
    )
    assert needed in str(caught.value)
    assert there in str(caught.value)
    assert "--max-model-len 512 would fit" in str(caught.value)
    resolve_max_model_len(make_config(max_model_len=512), kv_config)


def test_a_fitted_length_is_the_one_the_error_names(caplog: pytest.LogCaptureFixture) -> None:
    import dataclasses

    caplog.set_level(logging.INFO)
    config = dataclasses.replace(make_config(max_model_len=2048), fit_max_model_len=True)
    kv_config = size_kv_cache(config, {"a": FULL}, KVMemory(BLOCK * 33, ""))
    assert resolve_max_model_len(config, kv_config).model.max_model_len == 512
    assert "max_model_len = 512" in caplog.text
    roomy = size_kv_cache(config, {"a": FULL}, PLENTY)
    assert resolve_max_model_len(config, roomy).model.max_model_len == 2048
    for num_blocks in (0, 1):
        tiny = KVCacheConfig(num_blocks, kv_config.groups, kv_config.layer_specs)
        with pytest.raises(
            ConfigError, match=re.escape("there is memory for 0 (0.0 MiB): --max-model-len auto")
        ):
            resolve_max_model_len(config, tiny)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 200), st.integers(1, 100), st.integers(1, 300), st.integers(0, 2))
def test_the_longest_request_fits_and_no_longer_one(
    usable: int, chunk: int, limit: int, windows: int
) -> None:
    groups = tuple(KVCacheGroup((f"{i}",), spec) for i, spec in enumerate([FULL, *[WINDOW] * windows]))
    longest = largest_model_len(groups, usable, chunk, limit)
    fitting = [n for n in range(limit + 1) if blocks_per_request(groups, n, chunk) <= usable]
    assert longest == max(fitting)
