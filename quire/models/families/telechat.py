"""TeleChat (Z. Wang et al., 2024, arXiv:2401.03804) and TeleChat 2 (arXiv:2507.18013)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import MAX_WIDTH, biases, either, read_llama
from quire.models.json_object import JsonObject

_KEYS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "training_seqlen",
}
_NAMES = {
    "model": "transformer",
    "embed_tokens": "word_embeddings",
    "layers": "h",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "norm": "ln_f",
}
_MERGED = {"qkv_proj": ("query", "key_value", "key_value"), "gate_up_proj": ("gate_proj", "up_proj")}


def read_telechat(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with biases behind attention and MLP, and the key and value of each head together.

    Contexts end at `training_seqlen`: beyond it the model would stretch positions by the length of the prompt.
    """
    config = either(config, _KEYS)
    config.only("embed_layernorm", False)
    config.only("apply_residual_connection_post_layernorm", False)
    if "base_seqlen" in config:
        config.only("training_seqlen", config.integer("base_seqlen"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NAMES, _MERGED),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        hidden_act="silu",
        norm_eps=config.number("rms_norm_eps", 1e-5, high=1.0),
        qkv_grouped=True,
        mlp_out_bias=True,
        **biases(out=True),
    )
