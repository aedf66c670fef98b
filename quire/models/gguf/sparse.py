# SPDX-License-Identifier: Apache-2.0
"""Sparse GGUF architectures (mixture of experts); see `architectures`.

Invariant: torch-free.
"""

from __future__ import annotations

from quire.config.arch import QKV_APART
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import (
    EXPERTS,
    SANDWICH,
    Config,
    TensorPlace,
    TensorPlaces,
    biased,
    dense,
    named,
    windows,
)

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
CORRECTION_BIAS = "gate.e_score_correction_bias"
BALANCED: TensorPlaces = {"exp_probs_b.bias": TensorPlace(f"mlp.{CORRECTION_BIAS}", flat=True)}
"""Place of the load-balancing bias; some files have it as a row."""
TRINITY_PLACES: TensorPlaces = {**SANDWICH, **BALANCED, "attn_gate": "self_attn.gate_proj"}
GATED_APART = {"qkv_proj": (*QKV_APART["qkv_proj"], "gate_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Merged layers with gated attention heads."""

_DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}


def deepseek_experts(model: GgufModel) -> Config:
    """Return DeepSeek's keys, which several families adopted."""
    # Derived from two others; some converters write it wrongly.
    model.own.get("expert_shared_feed_forward_length")
    return {"norm_topk_prob": False, **named(model, _DEEPSEEK)}


def glm4_moe(model: GgufModel) -> Config:
    model.own.only("expert_gating_func", SIGMOID)
    normed = "blk.0.attn_q_norm.weight" in model.tensors
    return dense(
        model,
        "Glm4MoeForCausalLM",
        **deepseek_experts(model),
        use_qk_norm=normed,
        attention_bias=biased(model, "attn_q"),
    )


def dots1(model: GgufModel) -> Config:
    model.own.only("expert_gating_func", SIGMOID)
    full = ["full_attention"] * model.own.integer("block_count")
    return dense(model, "Dots1ForCausalLM", **deepseek_experts(model), layer_types=full)


def olmoe(model: GgufModel) -> Config:
    keys = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return dense(model, "OlmoeForCausalLM", **named(model, keys), norm_topk_prob=False)


def ernie_moe(model: GgufModel) -> Config:
    keys = {
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": "expert_shared_count",
        "moe_layer_interval": "interleave_moe_layer_step",
        "moe_layer_start_index": "leading_dense_block_count",
    }
    model.own.get("expert_shared_feed_forward_length")
    return dense(model, "Ernie4_5_MoeForCausalLM", **named(model, keys))


def exaone_moe(model: GgufModel) -> Config:
    model.own.only("expert_gating_func", SIGMOID)
    keys = {"num_experts": "expert_count", "num_shared_experts": "expert_shared_count"}
    config = dense(model, "ExaoneMoeForCausalLM", **deepseek_experts(model), **named(model, keys))
    return config | windows(model)


def minimax_m2(model: GgufModel) -> Config:
    model.own.only("expert_gating_func", SIGMOID)
    keys = {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
    }
    config = dense(model, "MiniMaxM2ForCausalLM") | named(model, keys)
    return config | {"rotary_dim": int(config["head_dim"] * config.pop("partial_rotary_factor") + 0.5)}


def hunyuan_moe(model: GgufModel) -> Config:
    """Hunyuan A13B; experts have the size of the shared one."""
    keys = {
        "num_experts": "expert_count",
        "moe_topk": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
    }
    model.own.only("expert_shared_count", 1)
    model.own.only("expert_shared_feed_forward_length", model.own.integer("expert_feed_forward_length"))
    config = dense(model, "HunYuanMoEV1ForCausalLM") | named(model, keys)
    return config | {"use_qk_norm": True, "num_shared_expert": 1}


def bailing_moe2(model: GgufModel) -> Config:
    """Ling and Ring 2.0."""
    own = model.own
    own.only("expert_gating_func", SIGMOID)
    keys = {"num_experts": "expert_count", "num_shared_experts": "expert_shared_count"}
    size = own.integer("expert_feed_forward_length") * own.integer("expert_shared_count", 0, low=0)
    own.only("expert_shared_feed_forward_length", size)
    return dense(
        model,
        "BailingMoeV2ForCausalLM",
        **deepseek_experts(model),
        **named(model, keys),
        score_function="sigmoid",
        use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors,
    )


def phimoe(model: GgufModel) -> Config:
    """Phi-3.5-MoE with its published routing, SparseMixer."""
    keys = {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "sliding_window": "attention.sliding_window",
    }
    config = dense(model, "PhimoeForCausalLM", **named(model, keys))
    return config | {
        "attention_bias": biased(model, "attn_q"),
        "lm_head_bias": "output.bias" in model.tensors,
        "sliding_window": config.get("sliding_window") or None,
    }


def afmoe(model: GgufModel) -> Config:
    """Trinity as in llama.cpp: every fourth layer has no window, and embeddings are scaled by the root of
    their size."""
    model.own.only("expert_gating_func", SIGMOID)
    keys = {
        **EXPERTS,
        "num_experts": "expert_count",
        "num_shared_experts": "expert_shared_count",
        "num_dense_layers": "leading_dense_block_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "route_scale": "expert_weights_scale",
        "route_norm": "expert_weights_norm",
    }
    config = {"sliding_window": None, "num_dense_layers": 0, **dense(model, "AfmoeForCausalLM")}
    return (
        config | windows(model) | named(model, keys) | {"mup_enabled": True, "global_attn_every_n_layers": 4}
    )
