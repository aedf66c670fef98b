"""Kimi Linear (Kimi team, 2025, arXiv:2510.26692) and Ling 3.0: delta attention, latent attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, DeltaArch, ExpertsArch, LatentArch, ModelArch
from quire.models.families.deepseek import attention_scale, read_latent_sizes
from quire.models.families.experts import all_layers, read_deepseek_experts
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, either, layer_kinds, read_llama, rms_eps
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_LATENT = "latent_attention"
_KINDS = {FULL: _LATENT, "linear_attention": "kimi_delta"}
_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "max_position_embeddings": "model_max_length",
}
"""What files call otherwise than DeepSeek-V3's do."""
_MERGED = {
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "qkv_a_proj": ("kv_a_proj_with_mqa",),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_DELTA = ("q_proj", "k_proj", "v_proj", "b_proj")
_RENAMED = {"k_up": "kv_b_proj", "v_up": "kv_b_proj", "shared_expert": "shared_experts"}
_LING_NAMES = {"embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense"}
_MAX_TAPS = 64


def read_kimi_linear(architecture: str, config: JsonObject) -> ModelArch:
    """Positions are known by what is kept and forgotten alone: nothing is rotated."""
    config.only("mla_use_nope", True)
    config.only("q_lora_rank")
    config.only("moe_layer_freq", 1)
    config.only("moe_router_activation_func", "sigmoid")
    config = either(config, _KEYS)
    # Experts are called as Mixtral's are, and dense layers as Llama's.
    sparse = _sparse_layers(config, 1)
    renamed = {f"layers.{layer}.mlp": "block_sparse_moe" for layer in sparse} | {"experts.*.down_proj": "w2"}
    merged = {"in_proj": (*_DELTA, "f_a_proj", "g_a_proj"), "experts.*.gate_up_proj": ("w1", "w3")}
    return _read(
        architecture,
        config,
        read_latent_sizes(config),
        names=CheckpointNames(_RENAMED | renamed, _MERGED | merged),
        layer_types=_kimi_layers(config),
        delta=_read_kimi_delta(config),
        rope=None,
        norm_eps=rms_eps(config, 1e-5),
        experts=_read_experts(config, sparse, default_scale=2.446),
    )


def read_bailing_hybrid(architecture: str, config: JsonObject) -> ModelArch:
    """Ling 3.0 (Ling team, 2026): decays have a bound, and each head of latent attention a gate."""
    config.only("q_lora_rank")
    config = either(config, _KEYS)
    latent = replace(read_latent_sizes(config), gated=True)
    rope = read_rope(config, head_dim=latent.rope_size, theta=6e6, interleaved=True)
    interval = config.integer("layer_group_size", 6)
    num_layers = len(all_layers(config))
    return _read(
        architecture,
        config,
        latent,
        names=CheckpointNames(
            _RENAMED | _LING_NAMES,
            _MERGED | {"in_proj": (*_DELTA, "f_proj", "g_proj")},
            unused=(rf"^model\.layers\.{num_layers}\.", r"^model\.mtp", r"\.rotary_emb\.inv_freq$"),
            adapters=CheckpointNames(
                _RENAMED, _MERGED | {"in_proj": (*_DELTA, "forget_gate.f_proj", "g_proj")}
            ),
        ),
        layer_types=layer_kinds(
            config, _KINDS, lambda layer: "kimi_delta" if (layer + 1) % interval else _LATENT
        ),
        delta=_read_ling_delta(config),
        rope=rope,
        attention_scale=attention_scale(latent, rope),
        experts=_read_experts(
            config, _sparse_layers(config, 2), default_scale=2.5, correction_bias="gate.expert_bias"
        ),
    )


def _read(architecture: str, config: JsonObject, latent: LatentArch, **fields: Any) -> ModelArch:
    return read_llama(
        architecture, config, latent=latent, head_dim=latent.rope_size, mlp_bias=False, **fields
    )


def _read_experts(config: JsonObject, layers: tuple[int, ...], **more: Any) -> ExpertsArch | None:
    return read_deepseek_experts(
        config, default_top_k=8, first=0, shared=1, normalized=True, layers=layers, **more
    )


def _kimi_layers(config: JsonObject) -> tuple[str, ...]:
    """Published files name the layers of one kind, and count from 1."""
    numbers = config.child("linear_attn_config")
    attends = numbers.numbers("full_attn_layers") if "full_attn_layers" in numbers else None

    def kind(layer: int) -> str:
        is_full = layer % 4 == 0 and layer > 0 if attends is None else layer + 1 in attends
        return _LATENT if is_full else "kimi_delta"

    return layer_kinds(config, _KINDS, kind)


def _sparse_layers(config: JsonObject, dense: int) -> tuple[int, ...]:
    """All but the first ones, unless the file says which."""
    if "mlp_layer_types" not in config:
        return all_layers(config)[config.integer("first_k_dense_replace", dense, low=0) :]
    kinds = config.texts("mlp_layer_types")
    return tuple(layer for layer in all_layers(config) if kinds[layer : layer + 1] == ("sparse",))


def _read_kimi_delta(config: JsonObject) -> DeltaArch:
    inner = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    own = config.child("linear_attn_config") if "linear_attn_config" in config else config.with_aliases(inner)
    taps = "short_conv_kernel_size" if "linear_attn_config" in config else "linear_conv_kernel_dim"
    heads, size = own.integer("num_heads", 32, high=MAX_HEADS), own.integer("head_dim", 128, high=MAX_WIDTH)
    return DeltaArch(heads, heads, size, size, taps=own.integer(taps, 4, low=2, high=_MAX_TAPS))


def _read_ling_delta(config: JsonObject) -> DeltaArch:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    # Files that transformers wrote have the other layers' size by the usual name.
    size = config.integer(
        "linear_head_dim" if "linear_head_dim" in config else "head_dim", 128, high=MAX_WIDTH
    )
    least = config.number("kda_lower_bound", -5.0, low=-100.0, high=0.0)
    return DeltaArch(
        heads,
        heads,
        size,
        size,
        taps=config.integer("short_conv_kernel_size", 4, low=2, high=_MAX_TAPS),
        least=least if config.flag("kda_safe_gate", True) else None,
        narrow=False,
    )
