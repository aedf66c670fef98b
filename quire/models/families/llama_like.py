# SPDX-License-Identifier: Apache-2.0
"""Models that differ from Llama in some options.

Among them Baichuan (Yang et al., 2023, arXiv:2309.10305), Cohere's Command and Aya (2024; 2025, arXiv:2504.00698),
InternLM 1 to 3 (Cai et al., 2024, arXiv:2403.17297), Solar Pro (Upstage, 2024: depth-upscaled, with skips), and
TeleChat (Z. Wang et al., 2024, arXiv:2401.03804; arXiv:2507.18013).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, ModelArch, Skip, Temperature
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    alternating_window,
    biases,
    declared_windows,
    either,
    full_layers,
    layer_norm,
    optional_number,
    plain_mlp,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import layer_rope, read_rope

_ROTARY_WIDTH, _VOCAB_OF_2 = 4096, 125696


def read_baichuan(architecture: str, config: JsonObject) -> ModelArch:
    """Baichuan: 7B is Llama with merged q, k and v, 13B has ALiBi; series 2 normalizes the head's rows.

    Only the first 7B is named BaiChuan. The width distinguishes the second 7B from the 13Bs, and the vocabulary series
    2 from 1.
    """
    config = either(config, {"max_position_embeddings": "model_max_length"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    is_rotary = architecture == "BaiChuanForCausalLM" or config.integer("hidden_size") == _ROTARY_WIDTH
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"qkv_proj": "W_pack"}, {"gate_up_proj": ("gate_proj", "up_proj")}),
        rope=read_rope(config, head_dim=head_dim) if is_rotary else None,
        alibi=None if is_rotary else 1.0,
        head_of_unit_rows=config.integer("vocab_size") == _VOCAB_OF_2,
        **biases(),
    )


def read_cohere(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Parallel blocks, layer norms without bias, adjacent dimensions rotated, scaled logits."""
    config.only("position_embedding_type", "rope_gptj")
    theta = fields.pop("theta", 5e5)
    attention_bias = config.flag("attention_bias", False)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        block="parallel",
        max_position_embeddings=_longest(config),
        norm_bias=False,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=theta, interleaved=True),
        qk_norm="each_head_layer" if config.flag("use_qk_norm", False) else None,
        logits_multiplier=config.number("logit_scale", 0.0625),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(qkv=attention_bias, out=attention_bias),
        **layer_norm(config),
        **fields,
    )


def _longest(config: JsonObject) -> int:
    """Return the context length: Command R's exceeds `max_position_embeddings` and is given by another key."""
    return max(config.integer("max_position_embeddings"), config.integer("model_max_length", 1))


def read_cohere2(architecture: str, config: JsonObject) -> ModelArch:
    """A window on three of four layers; the fourth has no positions."""
    windows = alternating_window(config, period=config.integer("sliding_window_pattern", 4))
    return read_cohere(architecture, config, theta=1e4, unrotated_layers=full_layers(windows), **windows)


_INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "qkv_proj": "wqkv",
    "o_proj": "wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
    "down_proj": "w2",
    "lm_head": "output",
}


def read_internlm(architecture: str, config: JsonObject) -> ModelArch:
    """Llama, with biases around attention."""
    bias = config.flag("bias", True)
    return read_llama(architecture, config, **biases(qkv=bias, out=bias))


def read_internlm2(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with other names; q, k and v are merged by key-value heads."""
    bias = config.flag("bias", True)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_INTERNLM2_NAMES, {"gate_up_proj": ("w1", "w3")}),
        qkv_grouped=True,
        **biases(qkv=bias, out=bias),
    )


def read_internlm3(architecture: str, config: JsonObject) -> ModelArch:
    """Llama, with biases of q, k and v, and of the rest."""
    bias = config.flag("bias", False)
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        norm_eps=rms_eps(config, 1e-5),
        **biases(qkv=config.flag("qkv_bias", False), out=bias, mlp=bias),
    )


_SKIPS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))
"""Keys of the layers where skips of one kind start, and where they end."""


def read_solar(architecture: str, config: JsonObject) -> ModelArch:
    """Solar Pro: a skip starts at the last start layer before its end.

    `sliding_window` is in the file, but no layer has a window.
    """
    config.get("sliding_window")
    shares = config.numbers("bskcn_tv")
    if len(shares) != 2 or not all(0.0 <= share <= 1.0 for share in shares):
        raise config.wrong("bskcn_tv", "two numbers in [0, 1], for training and for inference")
    skips = [skip for starts, ends in _SKIPS for skip in _skips(config, starts, ends, shares[1])]
    return read_llama(architecture, config, skips=tuple(skips))


def _skips(config: JsonObject, starts: str, ends: str, share: float) -> list[Skip]:
    started, made = _layers(config, starts), []
    for end in _layers(config, ends):
        before = [start for start in started if start <= end]
        if not before:
            raise config.wrong(ends, f"layers at or after the first of {starts}")
        made.append(Skip(max(before), end, share))
    return made


def _layers(config: JsonObject, key: str) -> list[int]:
    count = config.integer("num_hidden_layers", high=MAX_LAYERS)
    numbers = config.numbers(key)
    if not all(number.is_integer() and 0 <= number < count for number in numbers):
        raise config.wrong(key, f"a list of layers, 0 to {count - 1}")
    return [int(number) for number in numbers]


_KEYS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "training_seqlen",
}

_NAMES = {
    "model": "transformer",
    "embed_tokens": "word_embeddings",
    "layers": "h",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "norm": "ln_f",
}

_MERGED = {"qkv_proj": ("query", "key_value", "key_value"), "gate_up_proj": ("gate_proj", "up_proj")}


def read_telechat(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with biases after attention and MLP; each head's key and value are adjacent.

    Contexts end at `training_seqlen`: beyond it the model would scale positions by the prompt's length.
    """
    config = either(config, _KEYS)
    config.only("embed_layernorm", False)
    config.only("apply_residual_connection_post_layernorm", False)
    if "base_seqlen" in config:
        config.only("training_seqlen", config.integer("base_seqlen"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NAMES, _MERGED),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        hidden_act="silu",
        norm_eps=config.number("rms_norm_eps", 1e-5, high=1.0),
        qkv_grouped=True,
        mlp_out_bias=True,
        **biases(out=True),
    )


def read_ministral3(architecture: str, config: JsonObject) -> ModelArch:
    """Ministral 3 (Mistral, 2025): scaled rope, and queries scaled by position as in Llama 4."""
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


def read_nanochat(architecture: str, config: JsonObject) -> ModelArch:
    """nanochat (Karpathy, 2025): unweighted norms, one after the embeddings; negated rotation angles."""
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


def read_ernie(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """ERNIE 4.5: pairs of neighboring dimensions are rotated."""
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
    """Helium: pairs of neighboring dimensions are rotated; the output projection never has a bias."""
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
    """Return MiniCPM's multipliers, by its keys; the arguments are defaults."""
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
    renamed = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
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
