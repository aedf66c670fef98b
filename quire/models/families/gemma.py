"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 text (arXiv:2503.19786).

Scaled embeddings, weights of norms stored minus one, GELU. From Gemma 2 on a norm before and after each block, a query
scale of their own and windows on some layers; Gemma 2 caps scores and logits softly; Gemma 3 norms q and k and gives
windowed layers their own rotary embedding.
"""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_LAYERS,
    MAX_WIDTH,
    alternating_window,
    optional_number,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import SLIDING, read_rope


def read_gemma(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """One norm before each block, as Llama; its early checkpoints say "gelu" and mean the tanh form."""
    config.get("hidden_act")
    fields = {
        "default_head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_offset": 1.0,
        "embedding_multiplier": config.integer("hidden_size", high=MAX_WIDTH) ** 0.5,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }
    return read_llama(architecture, config, **(fields | differing))


def read_gemma2(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Soft caps, and a window on every other layer."""
    fields = {
        "block": "sandwich",
        "hidden_act": config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
        "attention_scale": config.number("query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5,
        "attn_logit_softcap": optional_number(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcap": optional_number(config, "final_logit_softcapping", 30.0),
    }
    windows = {} if "layer_types" in differing else alternating_window(config, period=2)
    return read_gemma(architecture, config, **(fields | windows | differing))


def read_vaultgemma(architecture: str, config: JsonObject) -> ModelArch:
    """VaultGemma (2025, arXiv:2510.15001): Gemma 2 with the norms before attention and MLP only."""
    names = CheckpointNames({"post_attention_layernorm": "pre_feedforward_layernorm"})
    return read_gemma2(architecture, config, block="sequential", names=names)


def read_gemma3(
    architecture: str, config: JsonObject, *, period: int = 6, window: int = 4096, **differing: Any
) -> ModelArch:
    """No soft caps; q and k are normed, and windowed layers (five of six) have their own rope.

    `period` and `window` are defaults. EmbeddingGemma (Schechter Vera et al., 2025, arXiv:2509.20354) is one that sees
    in both directions; its window is the width of both sides.
    """
    period = config.integer("sliding_window_pattern", period, high=MAX_LAYERS)
    head_dim = config.integer("head_dim", 256, high=MAX_WIDTH)
    local = config.with_values(rope_theta=None, rope_scaling=None)
    local_theta = config.number("rope_local_base_freq", 10000.0, low=1.0)
    windows = alternating_window(config, period=period, default=window)
    bidirectional = config.flag("use_bidirectional_attention", False)
    if bidirectional and windows:
        windows["sliding_window"] = windows["sliding_window"] // 2 + 1
    fields = {
        "qk_norm": "rms",
        "attn_logit_softcap": optional_number(config, "attn_logit_softcapping", None),
        "final_logit_softcap": optional_number(config, "final_logit_softcapping", None),
        "rope": read_rope(config, head_dim=head_dim, theta=1e6),
        "rope_local": read_rope(local, head_dim=head_dim, theta=local_theta, layer_type=SLIDING),
        "bidirectional": bidirectional,
        **windows,
    }
    return read_gemma2(architecture, config, **(fields | differing))
