# SPDX-License-Identifier: Apache-2.0
"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118), Gemma 3 text (arXiv:2503.19786), Gemma 3n text (Google, 2025)
and
RecurrentGemma (A. Botev et al., 2024, arXiv:2404.07839), a Griffin (arXiv:2402.19427).

Scaled embeddings, norm weights stored minus one, GELU. From Gemma 2 on, norms before and after each block, a query
scale of their own and windows on some layers; Gemma 2 soft-caps scores and logits; Gemma 3 norms q and k and gives
windowed layers their own rotary embedding; 3n widens the residual stream.
"""

from __future__ import annotations

import struct
from typing import Any

from quire.config.arch import AlternatingArch, CheckpointNames, ModelArch, RecurrentUnitArch
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    alternating_window,
    biases,
    either,
    optional_number,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

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
    """RecurrentGemma: two recurrent layers, then one of local attention, and so on; the rest is Gemma's."""
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
    """Round to bfloat16, ties to even, as the scale of its embeddings is."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[
        0
    ]
    return rounded


def read_gemma(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """One norm before each block, as in Llama; its early checkpoints say "gelu" and mean the tanh form."""
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

    `period` and `window` are defaults. EmbeddingGemma (Schechter Vera et al., 2025, arXiv:2509.20354) is bidirectional;
    its window is the width of both sides.
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


_PERIOD, _WINDOW = 5, 512
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def read_gemma3n(architecture: str, config: JsonObject) -> ModelArch:
    """Norm weights stored as they are; values are normed, too; the last layers reuse earlier keys and values."""
    config.only("altup_active_idx", 0)
    config.only("altup_correct_scale", True)
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    shared = _shared_kv(config, num_layers)
    return read_gemma3(
        architecture,
        _with_one_size(config, num_layers),
        period=_PERIOD,
        window=_WINDOW,
        names=CheckpointNames({"token_rows": ""}, unused=tuple(_unused_of(layer) for layer in shared)),
        norm_offset=0.0,
        attention_scale=1.0,
        v_norm=True,
        final_logit_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        shared_kv=shared,
        alternating=AlternatingArch(
            streams=config.integer("altup_num_inputs", 4, low=2, high=64),
            laurel_rank=config.integer("laurel_rank", 64, high=MAX_WIDTH),
            token_vocab=config.integer("vocab_size_per_layer_input", 262144, high=MAX_VOCAB),
            token_size=config.integer("hidden_size_per_layer_input", 256, high=MAX_WIDTH),
            sparsity=_sparsity(config, num_layers),
        ),
    )


def _with_one_size(config: JsonObject, num_layers: int) -> JsonObject:
    """Return the config with a single MLP size; a per-layer list must have equal entries."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list) or not sizes:
        return config
    config.only("intermediate_size", [sizes[0]] * num_layers)
    return config.with_values(intermediate_size=sizes[0])


def _shared_kv(config: JsonObject, num_layers: int) -> dict[int, int]:
    """Return reader -> source for the last layers, which read the cache of the last layer of their kind before them."""
    shared = config.integer("num_kv_shared_layers", 15, low=0, high=num_layers - 1)
    kinds = alternating_window(config, period=_PERIOD, default=_WINDOW).get(
        "layer_types", (FULL,) * num_layers
    )
    own = num_layers - shared
    latest = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if not latest.keys() >= set(kinds):
        raise config.wrong("num_kv_shared_layers", "such that a layer of each kind has keys and values")
    return {layer: latest[kinds[layer]] for layer in range(own, num_layers)}


def _unused_of(layer: int) -> str:
    return rf"\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."


def _sparsity(config: JsonObject, num_layers: int) -> tuple[float, ...]:
    """Return the sparsity of each layer; by default of the first ten, in a model that has more."""
    if "activation_sparsity_pattern" not in config:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (num_layers - sparse)
    shares = config.numbers("activation_sparsity_pattern")
    if len(shares) != num_layers or not all(0.0 <= share < 1.0 for share in shares):
        raise config.wrong("activation_sparsity_pattern", "num_hidden_layers numbers in [0, 1)")
    return shares
