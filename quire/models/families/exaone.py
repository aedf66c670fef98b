# SPDX-License-Identifier: Apache-2.0
"""Exaone 3 (LG AI Research, 2024, arXiv:2408.03541) and Exaone 4 (arXiv:2507.11407)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
from quire.models.families.experts import read_deepseek_experts
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    alternating_window,
    biases,
    either,
    full_layers,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject

_RENAMED = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn.attention",
    "o_proj": "out_proj",
    "post_attention_layernorm": "ln_2",
    "down_proj": "c_proj",
    "norm": "ln_f",
}
_MERGED = {**QKV_APART, "gate_up_proj": ("c_fc_0", "c_fc_1")}


def read_exaone(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with other names."""
    keys = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
    config = either(config, keys)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_RENAMED, _MERGED, (r"\.rotary(_emb)?\.inv_freq$",)),
        hidden_act=config.choice("activation_function", GATED_ACTIVATIONS, "silu"),
        norm_eps=rms_eps(config, 1e-5),
        **biases(),
    )


def read_exaone4(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Norms after attention and MLP and of q and k; if layers have windows, the others have no positions."""
    period = 4 if "layer_types" in config else config.integer("sliding_window_pattern", 4)
    windows = alternating_window(config, period=period)
    return read_llama(
        architecture,
        config,
        qk_norm="rms",
        norm_eps=rms_eps(config, 1e-5),
        unrotated_layers=full_layers(windows),
        **biases(),
        **windows,
        **({"block": "norm_after"} | fields),
    )


def read_exaone_moe(architecture: str, config: JsonObject) -> ModelArch:
    """K-EXAONE (2026, arXiv:2601.01739): EXAONE 4's attention, norms before it, DeepSeek-V3's routing."""
    experts = read_deepseek_experts(
        either(config, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}),
        default_top_k=8,
        first=1,
        shared=1,
        normalized=True,
        default_scale=2.5,
        correction_bias="e_score_correction_bias",
    )
    if experts is not None and "mlp_layer_types" in config:
        kinds = config.texts("mlp_layer_types")
        sparse = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
        experts = replace(experts, layers=sparse)
    names = CheckpointNames(
        {"shared_expert": "shared_experts"}, unused=(r"^mtp\.", r"\.rotary_emb\.inv_freq$")
    )
    return read_exaone4(architecture, config, block="sequential", names=names, experts=experts)
