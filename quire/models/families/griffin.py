"""RecurrentGemma (A. Botev et al., 2024, arXiv:2404.07839), a Griffin (arXiv:2402.19427)."""

from __future__ import annotations

import struct

from quire.config.arch import CheckpointNames, ModelArch, RecurrentUnitArch
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    optional_number,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import SLIDING, read_rope

_NAMES = CheckpointNames(
    {
        "self_attn": "temporal_block",
        "recurrent_unit": "temporal_block",
        "mlp": "mlp_block",
        "input_layernorm": "temporal_pre_norm",
        "post_attention_layernorm": "channel_pre_norm",
        "norm": "final_norm",
    },
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "linear_yx": ("linear_y", "linear_x"),
    },
)
_KINDS = {"recurrent": "recurrent_unit", "attention": SLIDING}
_MAX_TAPS = 64


def read_recurrent_gemma(architecture: str, config: JsonObject) -> ModelArch:
    """Two recurrent layers, then one of local attention, and so on; the rest is Gemma's."""
    config = either(config, {"attention_window_size": "sliding_window"})
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    head_dim = hidden_size // heads
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        intermediate_size=config.integer("intermediate_size", low=2, high=MAX_WIDTH) // 2,
        hidden_act=config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_offset=1.0,
        embedding_multiplier=_bfloat16(hidden_size**0.5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        max_position_embeddings=config.integer("max_position_embeddings", 8192),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        sliding_window=config.integer("attention_window_size", 2048),
        layer_types=_layer_types(config),
        recurrent_unit=_read_unit(config, hidden_size, heads),
        final_logit_softcap=optional_number(config, "logits_soft_cap", 30.0),
        **biases(qkv=config.flag("attention_bias", False), out=True, mlp=True),
    )


def _layer_types(config: JsonObject) -> tuple[str, ...]:
    words = (
        config.texts("block_types") if "block_types" in config else ("recurrent", "recurrent", "attention")
    )
    if not words or not set(words) <= _KINDS.keys():
        raise config.unsupported("block_types", f"a list of {' and '.join(_KINDS)}")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return tuple(_KINDS[words[layer % len(words)]] for layer in range(num_layers))


def _read_unit(config: JsonObject, hidden_size: int, heads: int) -> RecurrentUnitArch:
    width = config.integer("lru_width", hidden_size, high=MAX_WIDTH)
    if width % heads:
        raise config.wrong("lru_width", f"a multiple of num_attention_heads ({heads})")
    return RecurrentUnitArch(width, heads, config.integer("conv1d_width", 4, low=2, high=_MAX_TAPS))


def _bfloat16(value: float) -> float:
    """Rounded to eight bits, to even, as the scale of its embeddings is."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[
        0
    ]
    return rounded
