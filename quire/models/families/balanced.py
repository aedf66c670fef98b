"""Experts whose load a bias keeps even (DeepSeek-V3, arXiv:2412.19437), with attention to keys and values."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.experts import read_deepseek_experts
from quire.models.families.fields import (
    MAX_LAYERS,
    biases,
    declared_windows,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_SHARED_EXPERTS = {"shared_expert": "shared_experts"}


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
