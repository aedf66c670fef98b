# SPDX-License-Identifier: Apache-2.0
"""Decoders of T5 (Raffel et al., 2020, arXiv:1910.10683), T5 1.1, Flan-T5 (arXiv:2210.11416), mT5 (arXiv:2010.11934)
and UMT5 (arXiv:2304.09151).

RMS norms before attention and MLP, no biases, scores that are not scaled, and a relative position bias.
"""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ModelArch, encoder_positions
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, biases, either, read_arch
from quire.models.json_object import JsonObject
from quire.models.multimodal import T5_TOKENS

_KEYS = {
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
}
_NAMES = CheckpointNames(
    {
        "embed_tokens": "shared",
        "layers": "block",
        "self_attn": "layer.0.SelfAttention",
        "self_attn_layer_norm": "layer.0.layer_norm",
        "encoder_attn": "layer.1.EncDecAttention",
        "encoder_attn_layer_norm": "layer.1.layer_norm",
        "mlp": "layer.2.DenseReluDense",
        "final_layer_norm": "layer.2.layer_norm",
        "layer_norm": "final_layer_norm",
        "q_proj": "q",
        "k_proj": "k",
        "v_proj": "v",
        "out_proj": "o",
        "relative_bias": "relative_attention_bias",
        "up_proj": "wi",
        "down_proj": "wo",
    },
    {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("wi_0", "wi_1")},
    # The first files have a bias of cross-attention that was never used.
    unused=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
ACTIVATIONS = {
    "relu": ("plain", "relu"),
    "gelu": ("plain", "gelu"),
    "gelu_new": ("plain", "gelu_new"),
    "silu": ("plain", "silu"),
    "gated-gelu": ("gated", "gelu_new"),
    "gated-silu": ("gated", "silu"),
}
"""`feed_forward_proj` -> kind of MLP and its activation."""


def read_t5(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """The first layer's bias counts for all layers; a tied head is scaled."""
    config = either(config, _KEYS)
    size = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    mlp, activation = ACTIVATIONS[config.choice("feed_forward_proj", tuple(ACTIVATIONS), "relu")]
    config.flag("is_encoder_decoder", True)
    is_tied = config.flag("tie_word_embeddings", True)
    is_scaled = config.flag("scale_decoder_outputs", is_tied)
    layers = config.optional_integer("num_decoder_layers") or config.integer("num_layers")
    config = config.with_values(num_hidden_layers=layers)
    fields: dict[str, Any] = {
        "names": _NAMES,
        "intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH),
        "num_kv_heads": heads,
        "head_dim": config.integer("head_dim", high=MAX_WIDTH),
        "max_position_embeddings": encoder_positions(T5_TOKENS) + T5_TOKENS,
        "norm_eps": config.number("layer_norm_epsilon", 1e-6, high=1.0),
        "attention_scale": 1.0,
        "relative_buckets": config.integer("relative_attention_num_buckets", 32, high=MAX_WIDTH),
        "relative_farthest": config.integer("relative_attention_max_distance", 128, high=MAX_WIDTH),
        "logits_multiplier": size**-0.5 if is_scaled else 1.0,
        "tie_word_embeddings": is_tied,
        "mlp": mlp,
        "hidden_act": activation,
        **biases(False),
    }
    return read_arch(architecture, config, **(fields | differing))


def read_umt5(architecture: str, config: JsonObject) -> ModelArch:
    """Each layer has a bias of its own."""
    return read_t5(architecture, config, relative_everywhere=True)
