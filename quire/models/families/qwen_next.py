"""Qwen3-Next (Qwen, 2025): Gated DeltaNet (arXiv:2412.06464) in most layers, attention with gates in the others."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, DeltaArch, ModelArch
from quire.models.families.experts import read_qwen_experts
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, layer_kinds, read_head_dim, read_llama
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_KINDS = {FULL: FULL, "linear_attention": "gated_delta"}
_NAMES = CheckpointNames(
    merged={
        "qkv_proj": ("q_proj", "k_proj", "v_proj", "q_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
    unused=(r"\.rotary_emb\.inv_freq$", r"^mtp\."),
)
_MAX_TAPS = 64


def read_qwen3_next(architecture: str, config: JsonObject) -> ModelArch:
    """Norms are stored minus one; an expert sees every token; what guesses ahead is left out."""
    interval = config.integer("full_attention_interval", 4)
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS), 256)
    shared = config.integer("shared_expert_intermediate_size", 512, low=0, high=MAX_WIDTH)
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        norm_offset=1.0,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qk_norm="rms",
        attention_gate=True,
        layer_types=layer_kinds(
            config, _KINDS, lambda layer: "gated_delta" if (layer + 1) % interval else FULL
        ),
        delta=_read_delta(config),
        experts=read_qwen_experts(
            config, default_top_k=10, normalized=True, shared_size=shared, shared_gate=True
        ),
    )


def _read_delta(config: JsonObject) -> DeltaArch:
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
        grouped=True,
    )
