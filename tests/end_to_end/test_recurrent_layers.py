"""A model of attention and of layers that keep a state: another cache user, and nothing else in the engine knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire import LLM
from quire.config import EngineConfig
from quire.kernels.attention_metadata import StateMetadata
from quire.kv_cache.spec import KVCacheSpec, RecurrentStateSpec
from quire.layers.attention import Attention
from quire.layers.kv_cache import cache_planes
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM
from quire.models.registry import ModelRegistry
from tests.end_to_end.test_determinism import check_forks, prompts, run


class LinearAttention(nn.Module):
    """In place of `Attention`: s_t = s_(t - 1) / 2 + k_t * v_t for each head, of which the query takes its part."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.name = attention.name
        self.block_size = attention.block_size
        self.heads_per_kv_head = attention.num_heads // attention.num_kv_heads
        self.shape = (attention.num_kv_heads, attention.head_dim)

    def kv_cache_spec(self) -> KVCacheSpec:
        return RecurrentStateSpec(self.block_size, 4 * self.shape[0] * self.shape[1], checkpoint_blocks=3)

    def why_not_captured(self) -> str | None:
        return "a loop over tokens cannot be captured"

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        self.group_id = group_id
        (states,) = cache_planes(spec, tensor)
        self.states = states.view(torch.float32).view(-1, *self.shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        own = step.metadata(self.group_id, StateMetadata)
        products, sums = k * v, torch.empty_like(k)
        bounds, ends, tables = (
            part.tolist() for part in (own.query_start_loc, own.seq_lens, own.block_tables)
        )
        for first, last, end, table in zip(bounds[:-1], bounds[1:], ends, tables, strict=True):
            self._run(products[first:last], sums[first:last], end, table)
        return (q * sums.repeat_interleave(self.heads_per_kv_head, 1)).flatten(1)

    def _run(self, products: Tensor, sums: Tensor, end: int, table: list[int]) -> None:
        start = end - len(products)
        state = self.states[table[(start - 1) // self.block_size]] if start else torch.zeros(self.shape)
        for index, product in enumerate(products):
            state = state / 2 + product
            sums[index] = state
            position = start + index
            block_id = table[position // self.block_size]
            if block_id and (position + 1 == end or (position + 1) % self.block_size == 0):
                self.states[block_id] = state


class HybridForCausalLM(DecoderForCausalLM):
    """A Llama in which the first layer alone attends."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        for layer in list(self.model.layers)[1:]:
            layer.self_attn.attn = LinearAttention(layer.self_attn.attn)


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
    cached = hybrid(max_num_batched_tokens=16, max_num_seqs=16)
    assert run(cached, prompts()) == expected, "chunks of 16, cold prefix cache"
    assert run(cached, prompts()) == expected, "warm prefix cache"
    assert cached.llm_engine.call_core("stats")["prefix_cache_hits"] > 0
    tiny = hybrid(num_gpu_blocks_override=40, swap_space=0.01, preemption_mode="swap", async_scheduling=True)
    assert run(tiny, prompts()) == expected, "swapped, a step ahead"
    assert tiny.llm_engine.call_core("stats")["num_swaps"] > 0
    check_forks(tiny, plain)
