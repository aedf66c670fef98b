"""Command R (Cohere, 2024) and Command A, Command R7B and Aya (2025, arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any

from quire.config.arch import ModelArch
from quire.models.families.fields import (
    alternating_window,
    biases,
    full_layers,
    layer_norm,
    read_head_dim,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope


def read_cohere(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Attention and MLP side by side, layer norms without bias, neighbouring dimensions rotated, scaled logits."""
    config.only("position_embedding_type", "rope_gptj")
    theta = fields.pop("theta", 5e5)
    attention_bias = config.flag("attention_bias", False)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        block="parallel",
        max_position_embeddings=_longest(config),
        norm_bias=False,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=theta, interleaved=True),
        qk_norm="each_head_layer" if config.flag("use_qk_norm", False) else None,
        logits_multiplier=config.number("logit_scale", 0.0625),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(qkv=attention_bias, out=attention_bias),
        **layer_norm(config),
        **fields,
    )


def _longest(config: JsonObject) -> int:
    """Command R was made for more than `max_position_embeddings`, and says so elsewhere."""
    return max(config.integer("max_position_embeddings"), config.integer("model_max_length", 1))


def read_cohere2(architecture: str, config: JsonObject) -> ModelArch:
    """A window on three of four layers; the fourth knows no positions."""
    windows = alternating_window(config, period=config.integer("sliding_window_pattern", 4))
    return read_cohere(architecture, config, theta=1e4, unrotated_layers=full_layers(windows), **windows)
