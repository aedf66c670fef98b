"""Ling, by its architecture's name Bailing (Ling team, 2025, arXiv:2503.05139), Ling 2.0 (arXiv:2510.22115), Ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, ExpertsArch, LatentArch, ModelArch, RotatedLightningArch
from quire.models.families.deepseek import attention_scale, read_latent_sizes
from quire.models.families.experts import MAX_EXPERTS, all_layers, read_deepseek_experts, read_experts
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    read_head_dim,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "o_proj": "dense",
    "shared_expert": "shared_experts",
}
_MERGED = {"gate_up_proj": ("gate_proj", "up_proj")}


def read_bailing(architecture: str, config: JsonObject) -> ModelArch:
    """Ling: experts that a softmax chooses, beside shared ones."""
    config.only("norm_softmax", False)
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    top_k = config.integer("num_experts_per_tok", high=MAX_EXPERTS)
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("first_k_dense_replace", 0, low=0) :],
        routing={"default_top_k": None, "normalized": config.flag("norm_topk_prob", True) and top_k > 1},
        shared_size=size * config.integer("num_shared_experts", 0, low=0, high=64),
    )
    return _read(architecture, config, experts, head_of_unit_rows=config.flag("norm_head", False))


def read_bailing_v2(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Ling 2.0: DeepSeek-V3's choice of experts, norms of each head, of which half is rotated."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return _read(
        architecture,
        config,
        _read_balanced(config),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="rms" if config.flag("use_qk_norm", False) else None,
        **fields,
    )


def read_bailing_linear(architecture: str, config: JsonObject) -> ModelArch:
    """Ring-linear (arXiv:2510.19338): Ling 2.0, in which few layers attend, and the others keep a state."""
    return read_bailing_v2(architecture, config, **_lightning(config, FULL))


def read_bailing_v2_5(architecture: str, config: JsonObject) -> ModelArch:
    """Ling 2.5 (Ling team, 2026): Ring-linear, in which those that attend have latent attention."""
    latent = read_latent_sizes(config)
    lightning = _lightning(config, "latent_attention")
    head_dim = lightning["rotated_lightning"].head_dim
    rope = read_rope(
        config, head_dim=latent.rope_size, interleaved=config.flag("rope_interleave", True), partial=1.0
    )
    rope, turned = replace(rope, partial_rotary_factor=1.0), read_rope(config, head_dim=head_dim, partial=0.5)
    return _read(
        architecture,
        config,
        _read_balanced(config),
        names=_latent_names(config, latent),
        latent=latent,
        head_dim=latent.rope_size,
        rope=rope,
        # Tables are made for heads of the other layers' size.
        rope_local=replace(turned, partial_rotary_factor=turned.rotated(head_dim) / latent.rope_size),
        attention_scale=attention_scale(latent, rope),
        **lightning,
    )


def _read_balanced(config: JsonObject) -> ExpertsArch | None:
    config.only("score_function", "sigmoid")
    return read_deepseek_experts(
        either(config, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}),
        default_top_k=None,
        first=0,
        shared=0,
        normalized=True,
        correction_bias="gate.expert_bias",
        shared_size=config.optional_integer("moe_shared_expert_intermediate_size", high=MAX_WIDTH),
    )


def _lightning(config: JsonObject, attends: str) -> dict[str, Any]:
    """The last layer of each group attends, and so do those that make up no whole group."""
    for key in ("linear_silu", "use_linear_silu", "use_bias", "use_qkv_bias"):
        config.only(key, False)
    config.only("linear_rope", True)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    groups, layers = config.integer("group_norm_size", 1, high=heads), all_layers(config)
    if heads % groups:
        raise config.wrong("group_norm_size", f"a divisor of num_attention_heads ({heads})")
    size = config.integer("layer_group_size", 1, high=MAX_LAYERS)
    grouped = len(layers) // size * size
    return {
        "layer_types": tuple(
            attends if (layer + 1) % size == 0 or layer >= grouped else "rotated_lightning"
            for layer in layers
        ),
        "rotated_lightning": RotatedLightningArch(
            head_dim=read_head_dim(config, heads), groups=groups, qk_norm=config.flag("use_qk_norm", False)
        ),
    }


def _latent_names(config: JsonObject, latent: LatentArch) -> CheckpointNames:
    compressed = ("kv_a_proj_with_mqa",) if latent.query_rank is None else ("q_a_proj", "kv_a_proj_with_mqa")
    return replace(
        _names(config),
        renamed={**_NAMES, "k_up": "kv_b_proj", "v_up": "kv_b_proj"},
        merged={**_MERGED, "qkv_a_proj": compressed},
    )


def _names(config: JsonObject) -> CheckpointNames:
    # A layer behind the last, which guesses ahead, is left out.
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    unused = (r"\.rotary_emb\.inv_freq$", rf"^model\.layers\.{num_layers}\.", r"^model\.mtp")
    return CheckpointNames(_NAMES, _MERGED, unused)


def _read(architecture: str, config: JsonObject, experts: ExpertsArch | None, **fields: Any) -> ModelArch:
    return read_llama(
        architecture,
        config,
        **{"names": _names(config)} | fields,
        experts=experts,
        **biases(qkv=config.flag("use_qkv_bias", False), out=config.flag("use_bias", False)),
    )
