# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ in what they read: less memory than full attention everywhere, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from tests.end_to_end.test_determinism import prompts, run

OPTIONS: dict[str, Any] = {"max_model_len": 128, "cpu_threads": 1, "max_num_seqs": 16}


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Callable[..., LLM]:
    return lambda family, **options: LLM(str(tiny_model(family)), **OPTIONS | options)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "qwen2-window"])
def test_tokens_and_logprobs_do_not_depend_on_cached_blocks(family: str, model: Callable[..., LLM]) -> None:
    """Alternating layers: groups of their own against one group, chunked, from the prefix cache and preempted."""
    expected = run(model(family, disable_hybrid_kv_cache_manager=True), prompts())
    hybrid = model(family)
    assert run(hybrid, prompts()) == expected, "cold prefix cache"
    assert run(hybrid, prompts()) == expected, "warm prefix cache"
    assert hybrid.llm_engine.call_core("stats")["prefix_cache_hits"] > 0
    assert run(model(family, max_num_batched_tokens=16), prompts()) == expected, "chunks of 16"
    tiny = model(family, max_num_batched_tokens=16, num_gpu_blocks_override=26, block_size=8)
    assert run(tiny, prompts()) == expected, "preempted"
    assert tiny.llm_engine.call_core("stats")["num_preemptions"] > 0


def held_bytes(directory: Path, **options: Any) -> int:
    """Return the cache bytes of a request after 40 tokens behind a prompt of 60, in blocks of 4."""
    options = {"block_size": 4, "num_scheduler_steps": 1} | OPTIONS | options
    config = EngineConfig.from_args(model=str(directory), **options)
    engine = LLMEngine(config)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.add_request("a", {"prompt_token_ids": list(range(3, 63))}, params)
        for _ in range(40):
            engine.step()
        ready, usage = engine.core_ready, engine.call_core("stats")["kv_cache_usage"]
        block_bytes = ready.kv_cache_bytes // ready.num_blocks
        return round(usage * (ready.num_blocks - 1)) * block_bytes
    finally:
        engine.shutdown()


LAYER_BLOCK_BYTES = 2 * 4 * 2 * 24 * 4
"""Keys and values of 4 tokens, 2 heads of 24 float32 numbers."""


def test_layers_with_a_window_hold_only_its_blocks(tiny_model: Callable[[str], Path]) -> None:
    """99 tokens are cached: 25 blocks for a full layer, 3 for a window of 8 that lies across them."""
    directory = tiny_model("gemma3")  # 2 layers of each kind
    assert held_bytes(directory, disable_hybrid_kv_cache_manager=True) == 4 * 25 * LAYER_BLOCK_BYTES
    assert held_bytes(directory) == (2 * 25 + 2 * 3) * LAYER_BLOCK_BYTES


def test_a_model_of_windows_only_holds_only_their_blocks(tiny_model: Callable[[str], Path]) -> None:
    assert held_bytes(tiny_model("mistral")) == 3 * 3 * LAYER_BLOCK_BYTES  # 3 layers
