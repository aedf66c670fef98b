# SPDX-License-Identifier: Apache-2.0
"""A model with attention and recurrent layers needs no more of the engine than another cache user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.config import EngineConfig
from quire.kernels.reference_scan import leave_state, state_before, state_pieces
from quire.layers.attention import Attention
from quire.layers.states import StateCache
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM
from quire.models.registry import ModelRegistry
from tests.end_to_end.test_determinism import check_forks, prompts, run

UNUSED_FLOATS = 1500
"""So that a state is larger than keys and values of a block, as in real models."""


class LinearAttention(StateCache):
    """In place of `Attention`: s_t = s_(t - 1) / 2 + k_t * v_t for each head, of which the query takes its part."""

    def __init__(self, attention: Attention, config: EngineConfig) -> None:
        super().__init__(
            config=config,
            name=attention.name,
            parts=[(attention.num_kv_heads, attention.head_dim), (UNUSED_FLOATS,)],
        )
        self.heads_per_kv_head = attention.num_heads // attention.num_kv_heads

    def why_not_captured(self) -> str | None:
        return "a loop over tokens cannot be captured"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        states, _ = self.views
        sums = torch.zeros_like(k)
        for piece in state_pieces(self.metadata(step), len(states)):
            state = state_before(states, piece)
            for row in range(piece.first, piece.last):
                state = state / 2 + k[row] * v[row]
                sums[row] = state
            leave_state(states, piece, state)
        return (q * sums.repeat_interleave(self.heads_per_kv_head, 1)).flatten(1)


class HybridForCausalLM(DecoderForCausalLM):
    """A Llama in which the first layer alone attends."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        for layer in list(self.model.layers)[1:]:
            layer.self_attn.attn = LinearAttention(layer.self_attn.attn, config)


@pytest.fixture
def hybrid(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    rows = dict(ModelRegistry._rows)
    monkeypatch.setattr(ModelRegistry, "_rows", rows)
    ModelRegistry.register_model("HybridForCausalLM", HybridForCausalLM)
    overrides = {"architectures": ["HybridForCausalLM"]}
    options: dict[str, Any] = {"max_model_len": 128, "cpu_threads": 1, "hf_overrides": overrides}
    return lambda **args: LLM(str(tiny_model("llama-tied-bias")), **options | args)


def test_states_keep_the_determinism_contract(hybrid: Callable[..., LLM]) -> None:
    """Chunks, prefix hits on states, preemption, swaps to the host and forks: the same bits."""
    plain = hybrid(enable_prefix_caching=False)
    expected = run(plain, prompts())
    assert plain.llm_engine.core_ready.block_size == 2 * 16
    cached = hybrid(max_num_batched_tokens=16, max_num_seqs=16)
    assert run(cached, prompts()) == expected, "chunks of 16, cold prefix cache"
    assert run(cached, prompts()) == expected, "warm prefix cache"
    assert cached.llm_engine.call_core("stats")["prefix_cache_hits"] > 0
    tiny = hybrid(num_gpu_blocks_override=14, swap_space=0.01, preemption_mode="swap", async_scheduling=True)
    assert run(tiny, prompts()) == expected, "swapped, a step ahead"
    assert tiny.llm_engine.call_core("stats")["num_swaps"] > 0
    check_forks(tiny, plain)
