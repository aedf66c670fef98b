"""Jais (Sengupta et al., 2023, arXiv:2308.16149) and Jais 2 (2025)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    biases,
    either,
    layer_norm,
    plain_mlp,
    read_head_dim,
    read_llama,
)
from quire.models.families.gpt2 import KEYS, RENAMED, UNUSED, read_gpt2
from quire.models.json_object import JsonObject


def read_jais(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-2 with ALiBi, a gated MLP and muP's multipliers, whose keys later checkpoints begin with "mup_"."""
    for key, value in (
        ("position_embedding_type", "alibi"),
        ("activation_function", "swiglu"),
        ("alibi_scaling", None),
    ):
        config.only(key, value)
    heads = either(config, KEYS).integer("num_attention_heads", high=MAX_HEADS)
    head_dim = read_head_dim(either(config, KEYS), heads)
    names = CheckpointNames(
        RENAMED, {"gate_up_proj": ("c_fc2", "c_fc")}, (*UNUSED, r"\.relative_pe\.slopes$")
    )
    by_size = config.flag("mup_scale_qk_dot_by_d", config.flag("scale_qk_dot_by_d", False))
    return read_gpt2(
        architecture,
        config,
        names=names,
        positions=None,
        alibi=1.0,
        attention_scale=1.0 / head_dim if by_size else None,
        embedding_multiplier=config.number("mup_embeddings_scale", config.number("embeddings_scale", 1.0)),
        logits_multiplier=_logits_multiplier(config),
        mlp="gated",
        hidden_act="silu",
    )


def _logits_multiplier(config: JsonObject) -> float:
    width = config.number("mup_width_scale", config.number("width_scale", 1.0))
    return width * config.number("mup_output_alpha", 1.0)


def read_jais2(architecture: str, config: JsonObject) -> ModelArch:
    """Jais 2 (2025): squared ReLU, layer norms, biases."""
    attention_bias = config.flag("attention_bias", True)
    mlp_bias = config.flag("mlp_bias", True)
    return read_llama(
        architecture,
        config,
        **layer_norm(config),
        **plain_mlp(config, "relu2"),
        **biases(qkv=attention_bias, out=attention_bias, mlp=mlp_bias),
    )
