# SPDX-License-Identifier: Apache-2.0
"""Qwen (Bai et al., 2023, arXiv:2309.16609), Qwen 2 (arXiv:2407.10671), Qwen 3 (arXiv:2505.09388), MiMo, Qwen3-Next and
Qwen 3.5: Gated DeltaNet (arXiv:2412.06464) in most layers, gated attention in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, DeltaArch, ExpertStack, ModelArch, MTPArch
from quire.models.families.experts import read_qwen_experts
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    biases,
    either,
    layer_kinds,
    read_head_dim,
    read_llama,
    rms_eps,
    upper_window,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_KINDS = {FULL: FULL, "linear_attention": "gated_delta"}
_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj", "q_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_APART = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_UNUSED = (r"\.rotary_emb\.inv_freq$", r"^mtp\.")
_MTP = MTPArch(
    at="mtp.layers.0",
    names={
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "head_norm": "mtp.norm",
    },
    is_counted=False,
    mixer=FULL,
    gives_normed=True,
)
_MAX_TAPS = 64


def read_qwen3_next(architecture: str, config: JsonObject) -> ModelArch:
    """Qwen3-Next (Qwen, 2025): experts, one of them shared."""
    return _read(
        architecture,
        config,
        names=CheckpointNames(merged=_MERGED, unused=_UNUSED),
        delta=_read_delta(config, grouped=True),
        experts=read_qwen_experts(
            config, default_top_k=10, normalized=True, shared_size=_shared_size(config), shared_gate=True
        ),
    )


def read_qwen3_5(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Qwen 3.5 (Qwen, 2026), text: unmerged delta projections; a token's three positions are equal."""
    return _read(
        architecture,
        config,
        names=CheckpointNames(merged=_MERGED | _APART, unused=_UNUSED),
        delta=_read_delta(config, grouped=False),
        **fields,
    )


def read_qwen3_5_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Sparse Qwen 3.5: experts in all layers, as in Qwen3-Next; a layer's may be in one tensor."""
    experts = read_qwen_experts(
        config,
        default_top_k=8,
        normalized=True,
        shared_size=_shared_size(config),
        shared_gate=True,
        stack=ExpertStack(gate_up="gate_up_proj", weight=""),
    )
    # No layer is dense, and files have no size for one.
    size = config.integer("intermediate_size", 1, high=MAX_WIDTH)
    return read_qwen3_5(architecture, config, experts=experts, intermediate_size=size)


def _read(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Read the common fields; norms are stored minus one."""
    interval = config.integer("full_attention_interval", 4)
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS), 256)
    return read_llama(
        architecture,
        config,
        norm_offset=1.0,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qk_norm="rms",
        attention_gate=True,
        mtp=_MTP,
        layer_types=layer_kinds(
            config, _KINDS, lambda layer: "gated_delta" if (layer + 1) % interval else FULL
        ),
        **fields,
    )


def _shared_size(config: JsonObject) -> int:
    return config.integer("shared_expert_intermediate_size", 512, low=0, high=MAX_WIDTH)


def _read_delta(config: JsonObject, *, grouped: bool) -> DeltaArch:
    key_heads = config.integer("linear_num_key_heads", 16, high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", 32, high=MAX_HEADS)
    if value_heads % key_heads:
        raise config.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return DeltaArch(
        key_heads,
        value_heads,
        key_dim=config.integer("linear_key_head_dim", 128, high=MAX_WIDTH),
        value_dim=config.integer("linear_value_head_dim", 128, high=MAX_WIDTH),
        taps=config.integer("linear_conv_kernel_dim", 4, low=2, high=_MAX_TAPS),
        grouped=grouped,
    )


_QWEN_KEYS = {
    "head_dim": "kv_channels",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}
_QWEN_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "down_proj": "c_proj",
    "norm": "ln_f",
}
_MIMO_MTP = MTPArch(
    at="model.mtp_layers.0",
    names={
        "enorm": "{at}.token_layernorm",
        "hnorm": "{at}.hidden_layernorm",
        "eh_proj": "{at}.input_proj",
        "head_norm": "{at}.final_layernorm",
    },
    state_first=True,
    reads_sums=True,
)


def read_qwen(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with biased q, k and v and other names; the file counts gate and up together.

    Beyond `seq_length` it would scale queries and the rotary base by the prompt's length; contexts end there.
    """
    config.only("no_bias", True)
    config = either(config, _QWEN_KEYS)
    length = "seq_length" if "seq_length" in config else "max_position_embeddings"
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(
            _QWEN_NAMES, {"gate_up_proj": ("w2", "w1")}, (r"\.rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")
        ),
        intermediate_size=config.integer("intermediate_size", low=2, high=MAX_WIDTH) // 2,
        max_position_embeddings=config.integer(length),
        norm_eps=rms_eps(config, 1e-6),
        **biases(qkv=True),
    )


def read_qwen2(architecture: str, config: JsonObject) -> ModelArch:
    """Biased q, k and v; a window on the upper layers, off unless `use_sliding_window`."""
    return read_llama(architecture, config, **biases(qkv=True), **upper_window(config))


def read_mimo(architecture: str, config: JsonObject) -> ModelArch:
    """MiMo 7B (Xiaomi, 2025, arXiv:2505.07608): Qwen 2 with MTP layers."""
    arch = read_qwen2(architecture, config)
    names = replace(arch.names, unused=(*arch.names.unused, r"^model\.mtp_layers\."))
    return replace(arch, names=names, mtp=_MIMO_MTP)


def read_qwen3(architecture: str, config: JsonObject) -> ModelArch:
    """q and k are normed per head; a window as in Qwen 2."""
    return read_llama(architecture, config, default_head_dim=128, qk_norm="rms", **upper_window(config))
