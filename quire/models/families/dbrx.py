"""DBRX (Databricks, 2024)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ExpertsArch, ExpertStack, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    biases,
    either,
    layer_norm,
    read_head_dim,
    read_kv_heads,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "blocks",
    "input_layernorm": "norm_attn_norm.norm_1",
    "self_attn": "norm_attn_norm.attn",
    "qkv_proj": "Wqkv",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm_attn_norm.norm_2",
    "mlp": "ffn",
    "gate": "router.layer",
    "experts": "experts.mlp",
    "down_proj": "w2",
    "norm": "norm_f",
}
_STACK = ExpertStack(("down_proj",), flat=True, weight="")


def read_dbrx(architecture: str, config: JsonObject) -> ModelArch:
    """Experts in every layer, layer norms without bias, and bounds for q, k and v."""
    config = either(config, _KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    attention, experts = config.child("attn_config"), config.child("ffn_config")
    head_dim = read_head_dim(config, heads)
    # It stands in the object of attention.
    rotary = config if "rope_theta" in config else config.with_values(rope_theta=attention.get("rope_theta"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NAMES, {"gate_up_proj": ("w1", "v1")}),
        intermediate_size=experts.integer("ffn_hidden_size", 3584, high=MAX_WIDTH),
        head_dim=head_dim,
        num_kv_heads=read_kv_heads(attention, heads, "kv_n_heads") if "kv_n_heads" in attention else 1,
        rope=read_rope(rotary, head_dim=head_dim),
        qkv_clip=attention.optional_number("clip_qkv", low=1e-6),
        norm_bias=False,
        experts=_experts(config, experts),
        **layer_norm(config),
        **biases(False),
    )


def _experts(config: JsonObject, ffn: JsonObject) -> ExpertsArch | None:
    ffn.child("ffn_act_fn").choice("name", ("silu",), "silu")
    ffn.only("moe_normalize_expert_weights", 1)
    normalized = ffn.values.get("moe_normalize_expert_weights", 1) is not None
    return read_experts(
        either(ffn, {"num_experts_per_tok": "moe_top_k"}),
        count="moe_num_experts",
        size="ffn_hidden_size",
        layers=all_layers(config),
        routing={"default_top_k": 1, "normalized": normalized},
        stack=_STACK,
    )
