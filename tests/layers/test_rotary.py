# SPDX-License-Identifier: Apache-2.0
"""Tables of rotary angles against transformers' formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.config import EngineConfig, ModelArch
from quire.layers.rotary import RotaryEmbedding, cos_sin_table
from quire.layers.step import StepContext
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope
from tests.fixtures.folded import folded

HEAD_DIM, MAX_POSITION = 16, 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "yarn attention_factor": {"factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
    "yarn mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "yarn betas": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]},
}


def engine_config(rope: dict[str, Any], max_model_len: int) -> EngineConfig:
    values = {
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope,
        "original_max_position_embeddings": 32,
    }
    arch = ModelArch(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope=read_rope(JsonObject("config.json", values), head_dim=HEAD_DIM),
    )
    return EngineConfig(model_arch=arch).evolve(max_model_len=max_model_len)


def table(rope: dict[str, Any], max_model_len: int) -> Tensor:
    config = engine_config(rope, max_model_len)
    assert config.arch.rope is not None
    return cos_sin_table(config, config.arch.rope)


def oracle(rope: dict[str, Any], max_model_len: int) -> Tensor:
    config_class = Phi3Config if rope["rope_type"] == "longrope" else LlamaConfig
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": MAX_POSITION}
    extra = {"original_max_position_embeddings": 32} if config_class is Phi3Config else {"head_dim": HEAD_DIM}
    config = config_class(**sizes, **extra, pad_token_id=0, rope_parameters=dict(rope))
    if rope["rope_type"] == "default":
        frequencies, scale = 1.0 / 500.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    else:
        init = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        frequencies, scale = init(config, torch.device("cpu"), seq_len=max_model_len)
    angles = torch.outer(torch.arange(max_model_len).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1) * scale


@folded("max_model_len", [32, 64, 100])
@folded("kind", sorted(KINDS.keys() - {"dynamic"}))
def test_tables_equal_transformers(kind: str, max_model_len: int) -> None:
    """`longrope` as transformers has it for a sequence of the longest allowed length."""
    rope = {"rope_type": kind.split()[0], "rope_theta": 500.0, **KINDS[kind]}
    torch.testing.assert_close(table(rope, max_model_len), oracle(rope, max_model_len), rtol=0.0, atol=2e-5)


def test_dynamic_rotary_is_that_of_a_sequence_ending_there() -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
    ours = table(rope, 100)
    for length in (1, 10, 63, 64, 65, 80, 100):
        torch.testing.assert_close(ours[length - 1], oracle(rope, length)[-1], rtol=0.0, atol=5e-5)


def test_dynamic_is_unscaled_within_the_trained_context() -> None:
    dynamic = table({"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}, 100)
    default = table({"rope_type": "default", "rope_theta": 500.0}, 100)
    assert torch.equal(dynamic[:64], default[:64])
    assert not torch.allclose(dynamic[64:], default[64:], atol=1e-2)


def test_partial_rotation_leaves_the_rest_of_each_head() -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = engine_config(rope, 0)
    assert config.arch.rope is not None
    rotary = RotaryEmbedding(config=config, rope=config.arch.rope)
    assert rotary.cos_sin_cache.shape == (MAX_POSITION, HEAD_DIM // 2)
    q, k = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 1, HEAD_DIM)
    rotated_q, rotated_k = rotary(torch.tensor([5, 1, 9]), q.clone(), k.clone(), StepContext(()))
    assert torch.equal(rotated_q[..., 8:], q[..., 8:])
    assert torch.equal(rotated_k[..., 8:], k[..., 8:])
    assert not torch.equal(rotated_q[..., :8], q[..., :8])


def test_the_table_is_on_the_host_even_in_a_meta_context() -> None:
    config = engine_config({"rope_type": "default"}, 0)
    assert config.arch.rope is not None
    with torch.device("meta"):
        rotary = RotaryEmbedding(config=config, rope=config.arch.rope)
    assert rotary.cos_sin_cache.device.type == "cpu"
