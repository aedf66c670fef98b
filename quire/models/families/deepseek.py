# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 with latent attention (MLA; 2024, arXiv:2405.04434), models that adopted it, and GLM-4 (GLM team,
2024, arXiv:2406.12793) in ChatGLM's and transformers' checkpoint formats.

GLM-4 rotates half of each head, in pairs of adjacent dimensions; gate and up are merged.
"""

from __future__ import annotations

import math
from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, LatentArch, ModelArch, RopeScaling
from quire.models.families.experts import read_deepseek_experts
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
)
from quire.models.families.llama_like import minicpm_multipliers
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_CHATGLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "vocab_size": "padded_vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
}
_CHATGLM_NAMES = {
    "model": "transformer",
    "embed_tokens": "embedding.word_embeddings",
    "layers": "encoder.layers",
    "self_attn": "self_attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "gate_up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
}


def read_glm(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """GLM-4 9B of 2024, in the form of transformers."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS), 128)
    common: dict[str, Any] = {
        "names": CheckpointNames(merged=QKV_APART),
        "head_dim": head_dim,
        "rope": read_rope(config, head_dim=head_dim, partial=0.5, interleaved=True),
        "norm_eps": rms_eps(config, 1.5625e-07),
        **biases(qkv=config.flag("attention_bias", True)),
    }
    return read_llama(architecture, config, **(common | fields))


def read_glm4(architecture: str, config: JsonObject) -> ModelArch:
    """GLM-4 of 2025 (0414): norms on both sides of attention and MLP."""
    renamed = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    return read_glm(architecture, config, block="sandwich", names=CheckpointNames(renamed, QKV_APART))


def read_chatglm(architecture: str, config: JsonObject) -> ModelArch:
    """ChatGLM 2 and 3 and GLM-4 9B as their authors published them."""
    for key, value in (
        ("rmsnorm", True),
        ("post_layer_norm", True),
        ("add_bias_linear", False),
        ("apply_residual_connection_post_layernorm", False),
        ("original_rope", True),
        ("pre_seq_len", None),
    ):
        config.only(key, value)
    config = either(config, _CHATGLM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    grouped = config.flag("multi_query_attention", False)
    head_dim = read_head_dim(config, heads)
    return read_glm(
        architecture,
        config,
        names=CheckpointNames(_CHATGLM_NAMES, {}, (r"\.rotary_pos_emb\.inv_freq$",)),
        num_kv_heads=read_kv_heads(config, heads, "multi_query_group_num") if grouped else heads,
        rope=read_rope(
            config,
            head_dim=head_dim,
            theta=10000.0 * config.number("rope_ratio", 1.0, low=1e-3),
            partial=0.5,
            interleaved=True,
        ),
        hidden_act="silu",
        norm_eps=rms_eps(config, 1e-5),
        **biases(qkv=config.flag("add_qkv_bias", False)),
    )


_UNITS = {"kv_lora_rank": 16, "v_head_dim": 16, "qk_rope_head_dim": 8}
"""Size -> required divisor: kernels compute that many elements together."""


def read_deepseek_moe(architecture: str, config: JsonObject) -> ModelArch:
    """DeepSeekMoE (Dai et al., 2024, arXiv:2401.06066): many small experts, and shared ones; no MLA."""
    config.only("scoring_func", "softmax")
    config.only("moe_layer_freq", 1)
    config.only("routed_scaling_factor", 1.0)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"shared_expert": "shared_experts"}),
        experts=read_deepseek_experts(
            config.with_values(n_group=1, topk_group=1),
            default_top_k=None,
            first=0,
            shared=0,
            normalized=False,
            balanced=False,
        ),
    )


def read_deepseek_v2(architecture: str, config: JsonObject) -> ModelArch:
    """DeepSeek-V2 (2024, arXiv:2405.04434): softmax routing, optionally limited to the groups with the best experts."""
    config.only("norm_topk_prob", False)
    config.only("scoring_func", "softmax")
    config.only("moe_layer_freq", 1)
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        config = config.with_values(n_group=1, topk_group=1)
    return read_latent(
        architecture,
        config,
        mlp_bias=config.flag("mlp_bias", False),
        experts=read_deepseek_experts(
            config, default_top_k=None, first=0, shared=0, normalized=False, balanced=False
        ),
    )


def read_deepseek_v3(architecture: str, config: JsonObject) -> ModelArch:
    """DeepSeek-V3 (2024, arXiv:2412.19437), R1 and Kimi K2: sigmoid routing with a load-balancing bias."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    return read_latent(
        architecture,
        config,
        mlp_bias=False,
        experts=read_deepseek_experts(config, default_top_k=8, first=3, shared=1, normalized=True),
    )


def read_glm4_moe_lite(architecture: str, config: JsonObject) -> ModelArch:
    """GLM 4.7 Flash (arXiv:2508.06471): a small DeepSeek-V3."""
    if "mlp_layer_types" in config:
        config = config.with_values(first_k_dense_replace=_num_dense(config))
    return read_latent(
        architecture,
        config,
        norm_eps=rms_eps(config, 1e-5),
        mlp_bias=False,
        experts=read_deepseek_experts(config, default_top_k=4, first=1, shared=1, normalized=True),
    )


def read_youtu(architecture: str, config: JsonObject) -> ModelArch:
    """Youtu-LLM (Tencent, 2025): latent attention without experts."""
    tied = config.flag("tie_word_embeddings", True)
    return read_latent(architecture, config, mlp_bias=False, tie_word_embeddings=tied)


def read_minicpm3(architecture: str, config: JsonObject) -> ModelArch:
    """MiniCPM 3 (OpenBMB, 2024): MiniCPM with latent attention, whose keys are rotated in halves."""
    if "v_head_dim" not in config:
        heads = config.integer("num_attention_heads", high=MAX_HEADS)
        config = config.with_values(v_head_dim=config.integer("hidden_size", high=MAX_WIDTH) // heads)
    return read_latent(
        architecture,
        config.with_values(rope_interleave=False),
        norm_eps=rms_eps(config, 1e-5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **minicpm_multipliers(config, embedding=12.0, depth=1.4, width=256.0),
    )


def read_latent(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Read a Llama with latent attention; MTP layers are skipped."""
    latent = read_latent_sizes(config)
    rope = read_rope(config, head_dim=latent.rope_size, interleaved=config.flag("rope_interleave", True))
    if rope.partial_rotary_factor != 1.0:
        raise config.unsupported("partial_rotary_factor", "1: the rotated size is qk_rope_head_dim")
    fields = {
        "names": _names(config, latent),
        "rope": rope,
        "attention_scale": attention_scale(latent, rope),
        "norm_eps": rms_eps(config, 1e-6),
    } | fields
    return read_llama(
        architecture,
        config,
        head_dim=latent.rope_size,
        latent=latent,
        layer_types=("latent_attention",) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        **fields,
    )


def read_latent_sizes(config: JsonObject) -> LatentArch:
    """Read the latent sizes.

    Raises:
        UnsupportedModelError: no kernel supports a size; see `_UNITS`.
    """
    latent = LatentArch(
        rank=config.integer("kv_lora_rank", high=MAX_WIDTH),
        key_size=config.integer("qk_nope_head_dim", high=MAX_WIDTH),
        rope_size=config.integer("qk_rope_head_dim", high=512),
        value_size=config.integer("v_head_dim", high=MAX_WIDTH),
        query_rank=config.optional_integer("q_lora_rank", high=MAX_WIDTH),
    )
    for key, unit in _UNITS.items():
        if config.integer(key) % unit:
            raise config.unsupported(key, f"a multiple of {unit}")
    return latent


def _names(config: JsonObject, latent: LatentArch) -> CheckpointNames:
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    compressed = ("kv_a_proj_with_mqa",) if latent.query_rank is None else ("q_a_proj", "kv_a_proj_with_mqa")
    return CheckpointNames(
        {"k_up": "kv_b_proj", "v_up": "kv_b_proj", "shared_expert": "shared_experts"},
        {"qkv_a_proj": compressed, "gate_up_proj": ("gate_proj", "up_proj")},
        unused=(r"\.rotary_emb\.inv_freq$", rf"^model\.layers\.{num_layers}\."),
    )


def _num_dense(config: JsonObject) -> int:
    """Return the number of dense layers, which come first."""
    kinds = config.texts("mlp_layer_types")
    count = kinds.count("dense")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if kinds != ("dense",) * count + ("sparse",) * (num_layers - count):
        raise config.unsupported("mlp_layer_types", "dense for the first layers and sparse for the others")
    return count


def attention_scale(latent: LatentArch, rope: RopeScaling) -> float:
    """Return the factor of attention scores, including YaRN's (2023, arXiv:2309.00071)."""
    is_plain = rope.factor <= 1.0 or not rope.mscale_all_dim
    stretched = 1.0 if is_plain else 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) + 1.0
    return latent.query_size**-0.5 * stretched**2
