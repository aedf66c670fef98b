"""MiniMax-01 (2025, arXiv:2501.08313) and what came of it."""

from __future__ import annotations

from dataclasses import replace

from quire.config.arch import ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import biases, layer_kinds, read_head_dim, read_llama, rms_eps
from quire.models.families.sparse import MIXTRAL_NAMES
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_KINDS = {FULL: FULL, "linear_attention": "lightning"}
_SCALES = {FULL: "full_attn", "lightning": "linear_attn", "mlp": "mlp"}
_PUBLISHED_SCALES = {
    f"{ours}_{kind}_factor": f"layernorm_{theirs}_{kind}"
    for ours, theirs in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    )
    for kind in ("alpha", "beta")
}
_NAMES = replace(
    MIXTRAL_NAMES,
    renamed={**MIXTRAL_NAMES.renamed, "lightning_qkv": "qkv_proj"},
    unused=(*MIXTRAL_NAMES.unused, r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$"),
)


def read_minimax(architecture: str, config: JsonObject) -> ModelArch:
    """Lightning attention and full attention, experts in every layer, and a stream that is normed as it goes."""
    config.only("sliding_window")
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        block="normed_stream",
        layer_types=layer_kinds(config, _KINDS, lambda layer: "lightning" if layer % 2 else FULL),
        stream_scales={
            kind: (config.number(f"{key}_alpha_factor", 1.0), config.number(f"{key}_beta_factor", 1.0))
            for kind, key in _SCALES.items()
        },
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=all_layers(config),
            routing={"default_top_k": 2, "normalized": True},
        ),
        **biases(False),
    )


def read_minimax_text_01(architecture: str, config: JsonObject) -> ModelArch:
    """MiniMax-Text-01 and M1 (2025, arXiv:2506.13585) as published: other keys, and heads rotate in part."""
    config.only("postnorm", True)
    config.only("shared_intermediate_size", 0)
    config.only("attention_type", 0, 1)
    config.get("shared_moe_mode")
    kinds = {0.0: "linear_attention", 1.0: FULL}
    types = config.numbers("attn_type_list")
    if not set(types) <= kinds.keys():
        raise config.unsupported("attn_type_list", "a list of 0 and 1")
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    rotated = config.integer("rotary_dim", head_dim, high=head_dim)
    config = config.with_values(
        layer_types=[kinds[number] for number in types], partial_rotary_factor=rotated / head_dim
    )
    return read_minimax(architecture, config.with_aliases(_PUBLISHED_SCALES))


def read_minimax_m2(architecture: str, config: JsonObject) -> ModelArch:
    """MiniMax M2 (2025): norms of all of q and all of k; sigmoids choose, and a bias keeps the load even."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"), 128)
    partial = config.integer("rotary_dim", head_dim, high=head_dim) / head_dim
    return read_llama(
        architecture,
        config,
        names=MIXTRAL_NAMES,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=5e6, partial=partial),
        qk_norm="row_rms",
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=all_layers(config),
            routing={"default_top_k": 8, "scores": "sigmoid", "normalized": True},
            correction_bias="e_score_correction_bias",
        ),
        **biases(False),
    )
