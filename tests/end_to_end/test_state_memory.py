# SPDX-License-Identifier: Apache-2.0
"""Test of the cache blocks that a request of layers with states holds, at any context length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLMEngine, SamplingParams
from quire.config import EngineConfig

CONTEXTS = (2_000, 32_000)


def most_held(engine: LLMEngine, num_tokens: int) -> int:
    """Blocks, at any step of a prompt and of what is generated behind it."""
    engine.call_core("stats")  # which starts the core
    manager = engine._clients[0]._core.scheduler._kv  # type: ignore[attr-defined]
    free = manager.num_free_blocks
    prompt = {"prompt_token_ids": [3 + i % 200 for i in range(num_tokens)]}
    engine.add_request("long", prompt, SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False))
    held = 0
    while engine.has_unfinished_requests():
        engine.step()
        held = max(held, free - manager.num_free_blocks)
    assert manager.num_free_blocks == free
    return held


@pytest.mark.more
@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_memory_of_states_does_not_grow_with_the_context(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_args(
        model=str(tiny_model(name)), max_model_len=32_768, max_num_batched_tokens=512, max_num_seqs=1
    )
    engine = LLMEngine(config, in_process=True)
    short, long = (most_held(engine, num_tokens) for num_tokens in CONTEXTS)
    assert 0 < long == short
