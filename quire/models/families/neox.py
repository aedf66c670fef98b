"""Rotary models with layer norms and MLPs without a gate: GPT-J, GPT-NeoX and what came of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    biases,
    either,
    layer_norm,
    plain_mlp,
    read_head_dim,
    read_llama,
    uniform_window,
)
from quire.models.families.gpt2 import KEYS, RENAMED, UNUSED
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_NEOX_NAMES = {
    "model": "gpt_neox",
    "embed_tokens": "embed_in",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "final_layer_norm",
    "lm_head": "embed_out",
}
_PROCESSORS = 4
"""Among which CodeGen's heads were shared out in training."""
_PERSIMMON_NAMES = {
    "qkv_proj": "query_key_value",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "final_layernorm",
}


def read_gptj(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-J (Wang and Komatsuzaki, 2021): side by side, neighbouring dimensions rotated, biases in MLP and head."""
    config = either(config, KEYS)
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    partial = config.integer("rotary_dim", min(64, head_dim), high=head_dim) / head_dim
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    names = RENAMED | {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"}
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(names, unused=UNUSED),
        block="parallel",
        intermediate_size=config.integer("n_inner", four_times, high=MAX_WIDTH),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=partial, interleaved=True),
        head_bias=True,
        **layer_norm(config, "layer_norm_epsilon"),
        **plain_mlp(config, "gelu_new", "activation_function"),
        **biases(mlp=True),
    )


def read_codegen(architecture: str, config: JsonObject) -> ModelArch:
    """CodeGen (Nijkamp et al., 2022, arXiv:2203.13474): GPT-J, whose projections lie as on four processors."""
    arch = read_gptj(architecture, config)
    if arch.num_heads % _PROCESSORS:
        raise config.wrong("n_head", f"a multiple of {_PROCESSORS}")
    names = CheckpointNames(
        {**arch.names.renamed, "qkv_proj": "qkv_proj"}, {}, (*UNUSED, r"\.attn\.causal_mask$")
    )
    return replace(arch, names=names, qkv_blocks=_PROCESSORS)


def read_gpt_neox(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-NeoX and Pythia (Black et al., 2022, arXiv:2204.06745): side by side, each with its norm, or in turn."""
    config = either(config, {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    attention_bias = config.flag("attention_bias", True)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NEOX_NAMES, {}, (*UNUSED, r"\.attention\.(masked_)?bias$", r"\.inv_freq$")),
        block="parallel_two_norms" if config.flag("use_parallel_residual", True) else "sequential",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qkv_grouped=True,
        **layer_norm(config),
        **plain_mlp(config, "gelu"),
        **biases(qkv=attention_bias, out=attention_bias, mlp=True),
    )


def read_persimmon(architecture: str, config: JsonObject) -> ModelArch:
    """Persimmon (Adept, 2023): squared ReLU, layer norms of q and k, half of each head rotated."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_PERSIMMON_NAMES, {}),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qkv_grouped=True,
        qk_norm="layer" if config.flag("qk_layernorm", True) else None,
        **layer_norm(config),
        **plain_mlp(config, "relu2"),
        **biases(True),
    )


def read_stablelm(architecture: str, config: JsonObject) -> ModelArch:
    """StableLM 2 (Bellagente et al., 2024, arXiv:2402.17834): Llama with layer norms, a quarter of heads rotated."""
    config = either(config, {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"q_norm": "q_layernorm", "k_norm": "k_layernorm"}),
        block="parallel" if config.flag("use_parallel_residual", False) else "sequential",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qk_norm="each_head_layer_apart" if config.flag("qk_layernorm", False) else None,
        **layer_norm(config),
        **biases(qkv=config.flag("use_qkv_bias", False)),
    )


def read_starcoder2(architecture: str, config: JsonObject) -> ModelArch:
    """StarCoder 2 (Lozhkov et al., 2024, arXiv:2402.19173)."""
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"up_proj": "c_fc", "down_proj": "c_proj"}),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **layer_norm(config, "norm_epsilon"),
        **plain_mlp(config, "gelu_pytorch_tanh"),
        **biases(config.flag("use_bias", True)),
        **uniform_window(config, default=None),
    )


def read_nemotron(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Nemotron 3 and 4, Minitron (Parmar et al., 2024, arXiv:2402.16819): squared ReLU, weights of norms less one."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        norm_offset=1.0,
        **layer_norm(config, "norm_eps"),
        **plain_mlp(config, "relu2"),
    )
