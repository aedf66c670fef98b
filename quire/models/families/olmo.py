# SPDX-License-Identifier: Apache-2.0
"""OLMo (Groeneveld et al., 2024, arXiv:2402.00838), OLMo 2 (arXiv:2501.00656), OLMo 3 (2025), OLMo Hybrid (2026), and
Hunyuan dense (Tencent, 2025): norms of q and k after the rotation, and a fixed scaling of the rotary base.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, DeltaArch, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    alternating_window,
    layer_kinds,
    optional_number,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope


def read_hunyuan(
    architecture: str, config: JsonObject, names: Mapping[str, str] = MappingProxyType({}), **fields: Any
) -> ModelArch:
    """Hunyuan without shared keys and values (`use_cla`), with norms of q and k; `names` are additional renames."""
    config.only("use_cla", False)
    config.only("use_qk_norm", True)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"q_norm": "query_layernorm", "k_norm": "key_layernorm", **names}),
        head_dim=head_dim,
        rope=read_rope(_with_theta(config, head_dim), head_dim=head_dim),
        qk_norm="rms_after_rope",
        norm_eps=rms_eps(config, 1e-5),
        **fields,
    )


def _with_theta(config: JsonObject, head_dim: int) -> JsonObject:
    """Return the config with `alpha` applied to the rotary base, by the exponent of NTK-aware scaling, at any
    length."""
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.child(key)
    alpha = rope.optional_number("alpha", low=1e-6, high=1e9)
    if alpha is None:
        return config
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0, low=1.0), low=1.0)
    stretched = theta * alpha ** (head_dim / max(head_dim - 2, 1))
    return config.with_values(**{key: {"rope_type": "default", "rope_theta": stretched}})


def read_olmo(architecture: str, config: JsonObject) -> ModelArch:
    """Layer norms without weights; q, k and v may be clipped."""
    return read_llama(
        architecture,
        config,
        norm="layer",
        norm_eps=1e-5,
        norm_weight=False,
        norm_bias=False,
        qkv_clip=optional_number(config, "clip_qkv", None),
    )


def read_olmo2(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Norms after attention and MLP, and of all of q and all of k."""
    norms = {"block": "norm_after", "qk_norm": "row_rms", "norm_eps": rms_eps(config, 1e-5)}
    return read_llama(architecture, config, **(norms | fields))


def read_olmo3(architecture: str, config: JsonObject) -> ModelArch:
    """A window on three of four layers, whose rotary embedding is not scaled."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    plain = config.with_values(rope_scaling=None)
    return read_olmo2(
        architecture,
        config,
        rope=read_rope(config, head_dim=head_dim, theta=5e5),
        rope_local=read_rope(plain, head_dim=head_dim, theta=5e5, layer_type=SLIDING),
        **alternating_window(config, period=4),
    )


def read_olmo_hybrid(architecture: str, config: JsonObject) -> ModelArch:
    """Gated DeltaNet (arXiv:2412.06464) with pre-norms in three of four layers; OLMo 2's blocks in the others.

    States may have negative eigenvalues. Published models have no rotation.
    """
    last = config.integer("num_hidden_layers") - 1
    kinds = layer_kinds(
        config,
        {FULL: FULL, "linear_attention": "gated_delta"},
        lambda layer: FULL if layer % 4 == 3 or layer == last < 3 else "gated_delta",
    )
    rope = config.child("rope_parameters")
    rotates = "rope_parameters" not in config or "rope_theta" in rope
    fields: dict[str, Any] = {} if rotates else {"rope": None}
    return read_olmo2(
        architecture,
        config,
        names=_hybrid_names(kinds),
        layer_types=kinds,
        blocks={"gated_delta": "sequential"},
        delta=_read_delta(config),
        norm_eps=rms_eps(config, 1e-6),
        **fields,
    )


def _hybrid_names(kinds: tuple[str, ...]) -> CheckpointNames:
    """Return names, which differ for the norms of layers without attention."""
    renamed = {
        "input_layernorm": "attention_layer_norm",
        "linear_attn.norm": "o_norm",
        "linear_attn.out_proj": "o_proj",
    }
    for layer, kind in enumerate(kinds):
        if kind != FULL:
            renamed[f"layers.{layer}.post_attention_layernorm"] = "feedforward_layer_norm"
    merged = {
        **QKV_APART,
        "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj_qkvz": ("q_proj", "k_proj", "v_proj", "g_proj"),
        "in_proj_ba": ("b_proj", "a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    }
    return CheckpointNames(renamed, merged, unused=(r"\.rotary_emb\.inv_freq$", r"^mtp"))


def _read_delta(config: JsonObject) -> DeltaArch:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    key_heads = config.integer("linear_num_key_heads", heads, high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", heads, high=MAX_HEADS)
    if value_heads % key_heads:
        raise config.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    share = int(0.75 * config.integer("hidden_size", high=MAX_WIDTH) / key_heads)
    key_dim = config.integer("linear_key_head_dim", share, high=MAX_WIDTH)
    return DeltaArch(
        key_heads,
        value_heads,
        key_dim=key_dim,
        value_dim=config.integer("linear_value_head_dim", 2 * key_dim, high=MAX_WIDTH),
        taps=config.integer("linear_conv_kernel_dim", 4, low=2, high=64),
        norm_eps=1e-5,
        strongest=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )
