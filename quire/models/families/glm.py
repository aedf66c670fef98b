"""GLM-4 (GLM team, 2024, arXiv:2406.12793): ChatGLM's form of its checkpoints, and that of transformers.

Half of each head is rotated, in pairs of neighbouring dimensions; gate and up come merged.
"""

from __future__ import annotations

from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    biases,
    either,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_CHATGLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "vocab_size": "padded_vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
}
_CHATGLM_NAMES = {
    "model": "transformer",
    "embed_tokens": "embedding.word_embeddings",
    "layers": "encoder.layers",
    "self_attn": "self_attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "gate_up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
}


def read_glm(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """GLM-4 9B of 2024, in the form of transformers."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS), 128)
    common: dict[str, Any] = {
        "names": CheckpointNames(merged=QKV_APART),
        "head_dim": head_dim,
        "rope": read_rope(config, head_dim=head_dim, partial=0.5, interleaved=True),
        "norm_eps": rms_eps(config, 1.5625e-07),
        **biases(qkv=config.flag("attention_bias", True)),
    }
    return read_llama(architecture, config, **(common | fields))


def read_glm4(architecture: str, config: JsonObject) -> ModelArch:
    """GLM-4 of 2025 (0414): norms on both sides of attention and MLP."""
    renamed = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    return read_glm(architecture, config, block="sandwich", names=CheckpointNames(renamed, QKV_APART))


def read_chatglm(architecture: str, config: JsonObject) -> ModelArch:
    """ChatGLM 2 and 3 and GLM-4 9B as their authors published them."""
    for key, value in (
        ("rmsnorm", True),
        ("post_layer_norm", True),
        ("add_bias_linear", False),
        ("apply_residual_connection_post_layernorm", False),
        ("original_rope", True),
        ("pre_seq_len", None),
    ):
        config.only(key, value)
    config = either(config, _CHATGLM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    grouped = config.flag("multi_query_attention", False)
    head_dim = read_head_dim(config, heads)
    return read_glm(
        architecture,
        config,
        names=CheckpointNames(_CHATGLM_NAMES, {}, (r"\.rotary_pos_emb\.inv_freq$",)),
        num_kv_heads=read_kv_heads(config, heads, "multi_query_group_num") if grouped else heads,
        rope=read_rope(
            config,
            head_dim=head_dim,
            theta=10000.0 * config.number("rope_ratio", 1.0, low=1e-3),
            partial=0.5,
            interleaved=True,
        ),
        hidden_act="silu",
        norm_eps=rms_eps(config, 1e-5),
        **biases(qkv=config.flag("add_qkv_bias", False)),
    )
