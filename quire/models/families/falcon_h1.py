"""Falcon-H1 (TII, 2025, arXiv:2507.22448): attention and Mamba 2 side by side in every layer, and many multipliers."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, Mamba2Arch, ModelArch, TwoMixersArch
from quire.models.families.experts import all_layers
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, read_head_dim, read_llama
from quire.models.families.mamba import read_heads
from quire.models.families.mamba_hybrids import HYBRID_KEYS, STATE_NAMES
from quire.models.json_object import JsonObject

_NAMES = CheckpointNames(
    {
        **STATE_NAMES,
        "mixers": "",
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
        "norm": "final_layernorm",
    }
)
_WIDTH = 1024
"""Of Mamba's part, where the file has no such key; where it says null, that is what Mamba 2's usually is."""


def read_falcon_h1(architecture: str, config: JsonObject) -> ModelArch:
    """Keys are scaled before they are rotated, which is what scaled scores are."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        head_dim=head_dim,
        layer_types=("attention_and_mamba2",) * len(all_layers(config)),
        mamba2=_read_mamba(config),
        two_mixers=TwoMixersArch(
            attention_in=_multiplier(config, "attention_in_multiplier"),
            attention_out=_multiplier(config, "attention_out_multiplier"),
            mamba_in=_multiplier(config, "ssm_in_multiplier"),
            mamba_out=_multiplier(config, "ssm_out_multiplier"),
        ),
        attention_scale=head_dim**-0.5 * _multiplier(config, "key_multiplier"),
        embedding_multiplier=_multiplier(config, "embedding_multiplier"),
        logits_multiplier=_multiplier(config, "lm_head_multiplier"),
        gate_multiplier=gate,
        mlp_multiplier=down,
        norm_eps=_eps(config),
    )


def _read_mamba(config: JsonObject) -> Mamba2Arch:
    """Mixers whose width has a key of its own, with or without a norm."""
    heads = config.integer("mamba_n_heads", 128, high=MAX_HEADS)
    expanded = config.integer("mamba_expand", 2, high=64) * config.integer("hidden_size", high=MAX_WIDTH)
    unsaid = expanded if "mamba_d_ssm" in config.values else _WIDTH
    width = config.integer("mamba_d_ssm", unsaid, high=MAX_WIDTH)
    if width % heads or config.get("mamba_d_head") not in (None, "auto", width // heads):
        raise config.wrong("mamba_d_head", f"mamba_d_ssm / mamba_n_heads ({width} / {heads})")
    normed = config.flag("mamba_rms_norm", False)
    return read_heads(
        config.with_values(mamba_d_head=width // heads).with_aliases(HYBRID_KEYS),
        norm_eps=_eps(config) if normed else None,
        gate_after_norm=normed and config.flag("mamba_norm_before_gate", True),
        out_bias=config.flag("projectors_bias", False),
        groups=1,
        states=256,
        multipliers=_multipliers(config, "ssm_multipliers", 5),
    )


def _eps(config: JsonObject) -> float:
    return config.number("rms_norm_eps", 1e-5, high=1.0)


def _multiplier(config: JsonObject, key: str) -> float:
    return config.number(key, 1.0)


def _multipliers(config: JsonObject, key: str, count: int) -> tuple[float, ...]:
    """All 1 where the file has none."""
    values = config.numbers(key) if key in config else (1.0,) * count
    if len(values) != count:
        raise config.wrong(key, f"a list of {count} numbers")
    return values
