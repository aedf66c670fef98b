"""Exaone 3 (LG AI Research, 2024, arXiv:2408.03541) and Exaone 4 (arXiv:2507.11407)."""

from __future__ import annotations

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
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
    """Llama under other names."""
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


def read_exaone4(architecture: str, config: JsonObject) -> ModelArch:
    """Norms behind attention and MLP and of q and k; where layers have windows, the others know no positions."""
    period = 4 if "layer_types" in config else config.integer("sliding_window_pattern", 4)
    windows = alternating_window(config, period=period)
    return read_llama(
        architecture,
        config,
        block="norm_after",
        qk_norm="rms",
        norm_eps=rms_eps(config, 1e-5),
        unrotated_layers=full_layers(windows),
        **biases(),
        **windows,
    )
