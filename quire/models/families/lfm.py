"""LFM2 (Liquid AI, 2025, arXiv:2511.23404): short convolutions between two gates, and attention in some layers."""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ModelArch, ShortConvArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import MAX_WIDTH, biases, either, layer_kinds, read_llama
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL

_NAMES = CheckpointNames(
    {
        "mlp": "feed_forward",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "norm": "embedding_norm",
    },
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
)
_KINDS = {FULL: FULL, "conv": "short_conv"}
_MAX_TAPS = 64


def read_lfm2(architecture: str, config: JsonObject) -> ModelArch:
    """Dense; the size of its MLPs is stated before two thirds of it are rounded up."""
    config = either(config, {"tie_word_embeddings": "tie_embedding"})
    return _read(architecture, config, intermediate_size=_mlp_size(config))


def read_lfm2_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Experts behind the first layers, chosen by sigmoids and a bias that keeps the load even."""
    config = either(config, {"tie_word_embeddings": "tie_embedding"})
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("num_dense_layers", 2, low=0) :],
        routing={
            "default_top_k": 4,
            "scores": "sigmoid",
            "normalized": config.flag("norm_topk_prob", True),
            "scale": config.number("routed_scaling_factor", 1.0),
        },
        correction_bias="expert_bias" if config.flag("use_expert_bias", True) else None,
    )
    return _read(architecture, config, experts=experts)


def _read(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    attends = config.numbers("full_attn_idxs") if "full_attn_idxs" in config else all_layers(config)
    bias = config.flag("conv_bias", False)
    fields = {
        "names": _NAMES,
        "theta": 1e6,
        "norm_eps": config.number("norm_eps", 1e-5, high=1.0),
        "qk_norm": "rms",
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "layer_types": layer_kinds(config, _KINDS, lambda layer: FULL if layer in attends else "short_conv"),
        "short_conv": ShortConvArch(config.integer("conv_L_cache", 3, low=2, high=_MAX_TAPS), bias),
    }
    return read_llama(architecture, config, **(fields | biases(False) | differing))


def _mlp_size(config: JsonObject) -> int:
    size = either(config, {"block_ff_dim": "intermediate_size"}).integer("block_ff_dim", high=MAX_WIDTH)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0, high=64.0) * int(2 * size / 3))
    multiple = config.integer("block_multiple_of", 256, high=MAX_WIDTH)
    return -(-size // multiple) * multiple
