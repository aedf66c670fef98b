# SPDX-License-Identifier: Apache-2.0
"""Granite, dense and sparse, and its descendants."""

from __future__ import annotations

from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ExpertStack, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import MAX_WIDTH, optional_number, read_llama
from quire.models.json_object import JsonObject

GRANITE_NAMES = {
    "mlp": "",
    "gate": "block_sparse_moe.router.layer",
    "experts": "block_sparse_moe",
    "shared_expert": "shared_mlp",
    "gate_up_proj": "input_linear",
    "down_proj": "output_linear",
}


def read_granite(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Granite (IBM, 2024): four multipliers, after muP (Yang et al., 2022, arXiv:2203.03466)."""
    multipliers = {
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / config.number("logits_scaling", 1.0, low=1e-6),
    }
    return read_llama(architecture, config, **(multipliers | fields))


def read_hyperclovax(architecture: str, config: JsonObject) -> ModelArch:
    """HyperCLOVA X (2024, arXiv:2404.01954): Granite, with norms after attention and MLP, too."""
    names = {
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    }
    behind = {"block": "sandwich", "names": CheckpointNames(names)}
    return read_granite(
        architecture,
        config,
        attention_scale=optional_number(config, "attention_multiplier", None),
        logits_multiplier=config.number("logits_scaling", 1.0),
        **(behind if config.flag("use_post_norm", True) else {}),
    )


def read_granite_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Granite 3 MoE (IBM, 2024): a layer's experts in one tensor, and optionally a shared one."""
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 2, "normalized": True},
        stack=ExpertStack(),
        shared_size=config.integer("shared_intermediate_size", 0, low=0, high=MAX_WIDTH),
    )
    return read_granite(
        architecture, config, names=CheckpointNames(GRANITE_NAMES, QKV_APART), experts=experts
    )
