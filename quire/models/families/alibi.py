"""Models whose scores fall with distance (ALiBi) and those of their authors that rotate: BLOOM, MPT and Falcon."""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    biases,
    either,
    layer_norm,
    optional_number,
    plain_mlp,
    read_arch,
    read_head_dim,
    read_kv_heads,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_BLOOM_KEYS = {
    "hidden_size": "n_embed",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_BLOOM_NAMES = {
    "model": "transformer",
    "embed_tokens": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "layers": "h",
    "self_attn": "self_attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "ln_f",
}
_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_MPT_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "blocks",
    "input_layernorm": "norm_1",
    "self_attn": "attn",
    "qkv_proj": "Wqkv",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm_2",
    "mlp": "ffn",
    "norm": "norm_f",
}


def read_bloom(architecture: str, config: JsonObject) -> ModelArch:
    """BLOOM (Scao et al., 2022, arXiv:2211.05100): layer norms, also of the embedding; biases everywhere."""
    config.only("apply_residual_connection_post_layernorm", False)
    config = either(config, _BLOOM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_BLOOM_NAMES, {}),
        intermediate_size=4 * config.integer("hidden_size", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("seq_length", 2048),
        embedding_norm=True,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_grouped=True,
        alibi=1.0,
        mlp="plain",
        hidden_act="gelu_pytorch_tanh",
        **layer_norm(config, "layer_norm_epsilon"),
        **biases(True),
    )


def read_mpt(architecture: str, config: JsonObject) -> ModelArch:
    """MPT (MosaicML, 2023): no biases, also of norms; q, k and v may be clipped."""
    config.only("no_bias", True)
    config.only("logit_scale")
    config.only("norm_type", "low_precision_layernorm", "layernorm")
    attention = config.child("attn_config")
    for key, value in (("alibi", True), ("alibi_bias_max", 8), ("prefix_lm", False), ("qk_ln", False)):
        attention.only(key, value)
    attention.only("attn_type", "multihead_attention")
    config = either(config, _MPT_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_MPT_NAMES, {}),
        intermediate_size=config.integer("expansion_ratio", 4, high=64)
        * config.integer("hidden_size", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm_bias=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_scale=optional_number(attention, "softmax_scale", None),
        qkv_clip=optional_number(attention, "clip_qkv", None),
        alibi=1.0,
        mlp="plain",
        hidden_act="gelu",
        **layer_norm(config, "layer_norm_epsilon"),
    )


def read_falcon(architecture: str, config: JsonObject) -> ModelArch:
    """Falcon (Almazrouei et al., 2023, arXiv:2311.16867): with ALiBi (1B), side by side (7B), two norms (40B)."""
    config = either(config, _BLOOM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = read_head_dim(config, heads)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    has_alibi = config.flag("alibi", False)
    return read_llama(
        architecture,
        config,
        intermediate_size=config.integer("ffn_hidden_size", four_times, high=MAX_WIDTH),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_grouped=True,
        rope=None if has_alibi else read_rope(config, head_dim=head_dim),
        # Falcon scales the biases together with the scores.
        alibi=head_dim**-0.5 if has_alibi else None,
        **_falcon_block(config, heads),
        **layer_norm(config, "layer_norm_epsilon"),
        **plain_mlp(config, "gelu", "activation"),
        **biases(config.flag("bias", False)),
    )


def _falcon_block(config: JsonObject, heads: int) -> dict[str, Any]:
    """How many key-value heads there are and how norms are placed, which one flag changes together."""
    if not config.flag("new_decoder_architecture", False):
        block = "parallel" if config.flag("parallel_attn", True) else "sequential"
        kv_heads = 1 if config.flag("multi_query", True) else heads
        return {"block": block, "num_kv_heads": kv_heads, "names": CheckpointNames(_BLOOM_NAMES, {})}
    config.only("parallel_attn", True)
    kv_heads = read_kv_heads(config, heads, "num_kv_heads")
    if config.integer("num_ln_in_parallel_attn", 2, high=2) == 1:
        return {"block": "parallel", "num_kv_heads": kv_heads, "names": CheckpointNames(_BLOOM_NAMES, {})}
    names = _BLOOM_NAMES | {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    return {"block": "parallel_two_norms", "num_kv_heads": kv_heads, "names": CheckpointNames(names, {})}
