"""OPT (Zhang et al., 2022, arXiv:2205.01068) and XGLM (Lin et al., 2021, arXiv:2112.10668)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    biases,
    either,
    plain_mlp,
    read_arch,
    read_head_dim,
)
from quire.models.json_object import JsonObject

_XGLM_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention_heads",
}
_XGLM_NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "o_proj": "out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp": "",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "norm": "layer_norm",
}


def read_opt(architecture: str, config: JsonObject) -> ModelArch:
    """Learned positions; biases everywhere; the norm before or after; the embedding may be narrower."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    norm_before = config.flag("do_layer_norm_before", True)
    return read_arch(
        architecture,
        config,
        intermediate_size=config.integer("ffn_dim", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        norm="layer",
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        do_layer_norm_before=norm_before,
        final_norm=norm_before and not config.flag("_remove_final_layer_norm", False),
        word_embed_proj_dim=config.integer("word_embed_proj_dim", hidden_size, high=MAX_WIDTH),
        **plain_mlp(config, "relu", "activation_function"),
        **biases(config.flag("enable_bias", True)),
    )


def read_xglm(architecture: str, config: JsonObject) -> ModelArch:
    """Sinusoidal positions, of which the first two are unused; scaled embeddings; biases everywhere."""
    config = either(config, _XGLM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    is_scaled = config.flag("scale_embedding", True)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_XGLM_NAMES),
        intermediate_size=config.integer("ffn_dim", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_multiplier=config.integer("hidden_size", high=MAX_WIDTH) ** 0.5 if is_scaled else None,
        positions="sinusoidal",
        position_offset=2,
        **plain_mlp(config, "gelu", "activation_function"),
        **biases(True),
    )
