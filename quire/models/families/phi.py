"""Phi-1 to Phi-2 (arXiv:2306.11644, arXiv:2309.05463), Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import (
    biases,
    layer_norm,
    plain_mlp,
    read_head_dim,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope, with_kind_renamed

_PHI_NAMES = {
    "o_proj": "dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "norm": "final_layernorm",
}


def read_phi(architecture: str, config: JsonObject) -> ModelArch:
    """Attention and MLP side by side, half of each head rotated, biases everywhere, in the head too."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_PHI_NAMES),
        block="parallel",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="layer" if config.flag("qk_layernorm", False) else None,
        head_bias=True,
        **layer_norm(config),
        **plain_mlp(config, "gelu_new"),
        **biases(True),
    )


def read_phimoe(architecture: str, config: JsonObject) -> ModelArch:
    """Phi-3.5-MoE: SparseMixer (arXiv:2409.12136) chooses the experts; layer norms, biases of attention and head."""
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={
            "default_top_k": 2,
            "scores": "sparsemixer",
            "reach": 2 * config.number("router_jitter_noise", 0.01),
        },
    )
    attention_bias = config.flag("attention_bias", False)
    return read_llama(
        architecture,
        _with_one_scale(config),
        names=CheckpointNames(
            {"mlp": "block_sparse_moe", "down_proj": "w2"},
            {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
        ),
        theta=1e6,
        head_bias=config.flag("lm_head_bias", False),
        experts=experts,
        **layer_norm(config, "rms_norm_eps", 1e-5),
        **biases(qkv=attention_bias, out=attention_bias),
        **uniform_window(config, default=None),
    )


def _with_one_scale(config: JsonObject) -> JsonObject:
    """Longrope in which attention is scaled as `short_mscale` says, and `long_mscale` too."""
    values = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.child(key)
        if "short_mscale" in rope:
            rope.only("long_mscale", rope.get("short_mscale"))
            values[key] = rope.values | {"attention_factor": rope.number("short_mscale", low=1e-6)}
    return config.with_values(**values)


def read_phi3(architecture: str, config: JsonObject) -> ModelArch:
    """Merged weights; one window for all layers; its early checkpoints call longrope "su" or "yarn"."""
    return read_llama(
        architecture,
        with_kind_renamed(config, {"su": "longrope", "yarn": "longrope"}),
        names=CheckpointNames(merged={}),
        norm_eps=rms_eps(config, 1e-5),
        **uniform_window(config, default=None),
    )
