"""Llama (Touvron et al., 2023, arXiv:2302.13971) and models that take or leave an option of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, ModelArch, Temperature
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    biases,
    declared_windows,
    layer_norm,
    optional_number,
    plain_mlp,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
    uniform_window,
    unrotated_layers,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import layer_rope, read_rope

__all__ = ["read_llama"]


def read_mistral(architecture: str, config: JsonObject) -> ModelArch:
    """Mistral (Jiang et al., 2023, arXiv:2310.06825): every layer has the window, where there is one."""
    return read_llama(architecture, config, **uniform_window(config, default=4096))


def read_ministral(architecture: str, config: JsonObject) -> ModelArch:
    """Ministral: a window on the layers that the file names, else on all."""
    return read_llama(architecture, config, **declared_windows(config, lambda layer: True))


def read_ministral3(architecture: str, config: JsonObject) -> ModelArch:
    """Ministral 3 (Mistral, 2025): stretched positions, and queries that grow with them, as Llama 4's do."""
    rope = layer_rope(config)
    temperature = Temperature(
        interval=rope.number("original_max_position_embeddings", low=1.0),
        scale=rope.number("llama_4_scaling_beta"),
        rotated_too=True,
    )
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        temperature=temperature,
        **uniform_window(config, default=None),
        **biases(False),
    )


def read_cwm(architecture: str, config: JsonObject) -> ModelArch:
    """Code World Model (Meta, 2025, arXiv:2510.02387): a window on all but every fourth layer, the first being full."""
    windows = declared_windows(config, lambda layer: layer % 4 != 0, default=8192)
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        **biases(mlp=config.flag("mlp_bias", False)),
        **windows,
    )


def read_diffllama(architecture: str, config: JsonObject) -> ModelArch:
    """DiffLlama: attention is the difference of two."""
    if read_kv_heads(config, config.integer("num_attention_heads", high=MAX_HEADS)) % 2:
        raise config.wrong("num_key_value_heads", "even")
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    kinds = ("differential_attention",) * layers
    return read_llama(architecture, config, norm_eps=rms_eps(config, 1e-5), layer_types=kinds)


def read_arcee(architecture: str, config: JsonObject) -> ModelArch:
    """Arcee's AFM: an MLP without a gate."""
    return read_llama(architecture, config, norm_eps=rms_eps(config, 1e-5), **plain_mlp(config, "relu2"))


def read_smollm3(architecture: str, config: JsonObject) -> ModelArch:
    """SmolLM 3: some layers know no positions."""
    config.only("use_sliding_window", False)
    return read_llama(
        architecture,
        config,
        theta=2e6,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        unrotated_layers=unrotated_layers(config),
    )


def read_nanochat(architecture: str, config: JsonObject) -> ModelArch:
    """nanochat (Karpathy, 2025): norms without weights, one behind the embeddings; angles count the other way round."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"up_proj": "fc1", "down_proj": "fc2"}),
        norm_weight=False,
        embedding_norm=True,
        qk_norm="unweighted_rms_after_rope",
        rope=replace(read_rope(config, head_dim=head_dim), backwards=True),
        final_logit_softcap=optional_number(config, "final_logit_softcapping", 15.0),
        **biases(qkv=config.flag("attention_bias", False), out=config.flag("attention_bias", False)),
        **plain_mlp(config, "relu2"),
    )


def read_seed_oss(architecture: str, config: JsonObject) -> ModelArch:
    """Seed-OSS: biases of q, k and v, and of the rest, one by one."""
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        attention_bias=config.flag("attention_bias", True),
        attention_out_bias=config.flag("attention_out_bias", False),
    )


def read_orion(architecture: str, config: JsonObject) -> ModelArch:
    """Orion (Chen et al., 2024, arXiv:2401.12246): layer norms."""
    return read_llama(architecture, config, **layer_norm(config, "rms_norm_eps", 1e-5))


def read_ernie(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """ERNIE 4.5: pairs of neighbouring dimensions are rotated."""
    heads = config.integer("num_attention_heads")
    head_dim = read_head_dim(config, heads, 128)
    return read_llama(
        architecture,
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=5e5, interleaved=True),
        norm_eps=rms_eps(config, 1e-5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(config.flag("use_bias", False)),
        **fields,
    )


def read_helium(architecture: str, config: JsonObject) -> ModelArch:
    """Helium: pairs of neighbouring dimensions are rotated; the output projection never has a bias."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"), 128)
    return read_llama(
        architecture,
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=1e5, interleaved=True),
        norm_eps=rms_eps(config, 1e-8),
        **biases(qkv=config.flag("attention_bias", False), mlp=config.flag("mlp_bias", False)),
    )


def read_minicpm(architecture: str, config: JsonObject) -> ModelArch:
    """MiniCPM (Hu et al., 2024, arXiv:2404.06395): muP's multipliers by depth and width."""
    config.only("sparse_config")
    return read_llama(
        architecture,
        config,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **minicpm_multipliers(config),
    )


def minicpm_multipliers(
    config: JsonObject, *, embedding: float = 1.0, depth: float | None = None, width: float | None = None
) -> dict[str, float]:
    """What MiniCPM scales, by its keys; the rest are their defaults."""
    depth, width = (
        optional_number(config, "scale_depth", depth),
        optional_number(config, "dim_model_base", width),
    )
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return {
        "embedding_multiplier": config.number("scale_emb", embedding),
        "residual_multiplier": 1.0 if depth is None else depth / num_layers**0.5,
        "logits_multiplier": 1.0 if width is None else width / config.integer("hidden_size"),
    }


def read_apertus(architecture: str, config: JsonObject) -> ModelArch:
    """Apertus (2025, arXiv:2509.14233): xIELU in an MLP without a gate, norms of q and k."""
    config.only("post_norm", False)
    config.only("qk_norm", True)
    renamed = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(renamed, unused=(r"\.act_fn\.eps$",)),
        theta=12e6,
        norm_eps=rms_eps(config, 1e-5),
        qk_norm="rms",
        mlp="plain",
        hidden_act=config.choice("hidden_act", ("xielu",), "xielu"),
    )
