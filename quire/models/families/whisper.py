# SPDX-License-Identifier: Apache-2.0
"""Decoder of Whisper (Radford et al., 2022, arXiv:2212.04356)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch, Multimodal
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

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}


def read_whisper(architecture: str, config: JsonObject) -> ModelArch:
    """Layer norms before attention, cross-attention and a plain MLP; learned positions; biases but for keys.

    Positions count from the start of the encoder's output, see `quire.models.encoder_decoder`.
    """
    config = either(config, _KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    length = config.integer("max_source_positions", 1500, high=MAX_WIDTH)
    config.flag("is_encoder_decoder", True)
    config.only("scale_embedding", False)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames({"lm_head": "proj_out", "mlp": "", "up_proj": "fc1", "down_proj": "fc2"}),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=Multimodal("", {}, (), encoder_length=length).encoder_positions
        + config.integer("max_target_positions", 448, high=MAX_WIDTH),
        norm="layer",
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **plain_mlp(config, "gelu", "activation_function"),
        **biases(True),
    )
