"""Experts whose load a bias keeps even (DeepSeek-V3, arXiv:2412.19437), with attention to keys and values."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.experts import all_layers, read_deepseek_experts, read_experts
from quire.models.families.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    alternating_window,
    biases,
    declared_windows,
    full_layers,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_SHARED_EXPERTS = {"shared_expert": "shared_experts"}
_TRINITY_NAMES = CheckpointNames(
    _SHARED_EXPERTS
    | {
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "gate": "router.gate",
    },
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj", "gate_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
)


def read_glm4_moe(architecture: str, config: JsonObject) -> ModelArch:
    """GLM 4.5 to 4.7 (arXiv:2508.06471): half of each head is rotated; layers that guess ahead are left out."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    names = CheckpointNames(
        _SHARED_EXPERTS, unused=(r"\.rotary_emb\.inv_freq$", rf"^model\.layers\.{num_layers}\.")
    )
    return read_llama(
        architecture,
        config,
        names=names,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="rms" if config.flag("use_qk_norm", False) else None,
        norm_eps=rms_eps(config, 1e-5),
        experts=read_deepseek_experts(config, default_top_k=8, first=1, shared=1, normalized=True),
        **biases(qkv=config.flag("attention_bias", False)),
    )


def read_solar_open(architecture: str, config: JsonObject) -> ModelArch:
    """Solar Open (Upstage, 2026, arXiv:2601.07022): DeepSeek-V3's choice of experts, in every layer."""
    experts = read_deepseek_experts(
        config.with_values(first_k_dense_replace=0),
        default_top_k=8,
        first=0,
        shared=1,
        normalized=True,
    )
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_SHARED_EXPERTS),
        # No layer is dense, and the file has no size for one.
        intermediate_size=1,
        default_head_dim=128,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        experts=experts,
        **biases(qkv=config.flag("attention_bias", False)),
    )


def read_dots1(architecture: str, config: JsonObject) -> ModelArch:
    """dots.llm1 (2025, arXiv:2506.05767): q and k are normed per head."""
    first = config.integer("max_window_layers", 62, low=0)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_SHARED_EXPERTS),
        qk_norm="rms",
        experts=read_deepseek_experts(config, default_top_k=None, first=0, shared=0, normalized=False),
        **declared_windows(config, lambda layer: layer >= first),
    )


def read_afmoe(architecture: str, config: JsonObject) -> ModelArch:
    """Trinity (Arcee, 2025): gates of what heads make; a window and positions on all but every fourth layer."""
    for key, value in (("attention_bias", False), ("score_func", "sigmoid"), ("route_norm", True)):
        config.only(key, value)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.only(key, 1)
    windows = alternating_window(
        config, period=config.integer("global_attn_every_n_layers", 4, high=MAX_LAYERS), default=1024
    )
    size = config.integer("moe_intermediate_size", 1408, high=MAX_WIDTH)
    routing = {
        "default_top_k": 6,
        "scores": "sigmoid",
        "normalized": True,
        "scale": config.number("route_scale", 1.0),
    }
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("num_dense_layers", 1, low=0) :],
        routing=routing,
        correction_bias="expert_bias",
        shared_size=size * config.integer("num_shared_experts", 2, low=0, high=64),
    )
    mup = config.flag("mup_enabled", False)
    return read_llama(
        architecture,
        config,
        names=_TRINITY_NAMES,
        block="sandwich",
        default_head_dim=128,
        norm_eps=rms_eps(config, 1e-5),
        qk_norm="rms",
        attention_gate=True,
        unrotated_layers=full_layers(windows),
        embedding_multiplier=config.integer("hidden_size", high=MAX_WIDTH) ** 0.5 if mup else None,
        experts=experts,
        **biases(False),
        **windows,
    )
