# SPDX-License-Identifier: Apache-2.0
"""Decoders of BART (Lewis et al., 2019, arXiv:1910.13461) and its relatives: mBART (arXiv:2001.08210), Pegasus
(arXiv:1912.08777), Marian (arXiv:1804.00344), M2M-100 (arXiv:2010.11125) with NLLB (arXiv:2207.04672), and TrOCR
(arXiv:2109.10282).

They differ in where norms stand, in positions, and in norms of embeddings; see `quire.models.encoder_decoder`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, ModelArch, encoder_positions
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

KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
_NAMES = CheckpointNames(
    {"embed_tokens": "shared", "mlp": "", "up_proj": "fc1", "down_proj": "fc2"},
    unused=(r"(^|\.)embed_positions\.weights?$", r"(^|\.)(encoder|decoder)\.version$"),
)

_ALONE = replace(
    _NAMES, renamed={name: own for name, own in _NAMES.renamed.items() if name != "embed_tokens"}
)
"""Names of a decoder with an embedding of its own."""


def read_bart(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Norms after attention and MLP, and after the embedding; learned positions behind two unused rows."""
    config = either(config, KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    length = config.integer("max_position_embeddings", 1024, high=MAX_WIDTH)
    size = config.integer("hidden_size", high=MAX_WIDTH)
    config.flag("is_encoder_decoder", True)
    fields: dict[str, Any] = {
        "names": replace(_NAMES, unused=_NAMES.unused[1:]),
        "intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH),
        "num_kv_heads": heads,
        "head_dim": read_head_dim(config, heads),
        "max_position_embeddings": encoder_positions(config.integer("max_source_positions", length)) + length,
        "norm": "layer",
        "norm_eps": 1e-5,
        "do_layer_norm_before": False,
        "final_norm": False,
        "embedding_norm": True,
        "embedding_multiplier": size**0.5 if config.flag("scale_embedding", False) else None,
        "positions": "learned",
        "position_offset": 2,
        "logits_bias": config.flag("final_logits_bias", True),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        **plain_mlp(_with_silu(config), "gelu", "activation_function"),
        **biases(True),
    }
    return read_arch(architecture, config, **(fields | differing))


def _with_silu(config: JsonObject) -> JsonObject:
    """Return the object with SiLU under its later name."""
    swish = config.get("activation_function") == "swish"
    return config.with_values(activation_function="silu") if swish else config


def read_mbart(architecture: str, config: JsonObject) -> ModelArch:
    """Norms before attention and MLP, after the embedding, and at the end; behind an encoder of images without a bias
    of logits.
    """
    differing = {"do_layer_norm_before": True, "final_norm": True}
    if not config.flag("add_cross_attention", False):
        return read_bart(architecture, config, **differing)
    return read_bart(architecture, config, **differing, names=replace(_ALONE, unused=()), logits_bias=False)


def read_trocr(architecture: str, config: JsonObject) -> ModelArch:
    """Norms after attention and MLP, and perhaps after the embedding; learned or sinusoidal positions; keys and values
    of cross-attention from the encoder's size.
    """
    is_learned = config.flag("use_learned_position_embeddings", True)
    config.only("is_decoder", True)
    config.only("add_cross_attention", True)
    padding = config.integer("pad_token_id", 1, low=0)
    return read_bart(
        architecture,
        config,
        names=replace(
            _ALONE,
            renamed={**_ALONE.renamed, "lm_head": "output_projection"},
            unused=() if is_learned else _ALONE.unused,
        ),
        embedding_norm=config.flag("layernorm_embedding", True),
        positions="learned" if is_learned else "sinusoidal",
        position_offset=2 if is_learned else padding + 1,
        logits_bias=False,
        crossing_size=config.optional_integer("cross_attention_hidden_size", high=MAX_WIDTH),
    )


def read_pegasus(architecture: str, config: JsonObject) -> ModelArch:
    """Norms before attention and MLP, and at the end; sinusoidal positions."""
    return read_bart(
        architecture,
        config,
        names=_NAMES,
        do_layer_norm_before=True,
        final_norm=True,
        embedding_norm=False,
        positions="half_sinusoidal",
        position_offset=0,
    )


def read_marian(architecture: str, config: JsonObject) -> ModelArch:
    """Norms after attention and MLP; sinusoidal positions; encoder and decoder may have tables of their own."""
    vocab_size = config.integer("decoder_vocab_size", config.integer("vocab_size"))
    shares = config.flag("share_encoder_decoder_embeddings", True)
    return read_bart(
        architecture,
        config,
        vocab_size=vocab_size,
        names=_NAMES if shares else _ALONE,
        embedding_norm=False,
        positions="half_sinusoidal",
        position_offset=0,
    )


def read_m2m100(architecture: str, config: JsonObject) -> ModelArch:
    """Norms before attention and MLP, and at the end; sinusoidal positions behind two unused rows; no logits bias."""
    size = config.integer("d_model", high=MAX_WIDTH)
    return read_bart(
        architecture,
        config,
        names=_NAMES,
        do_layer_norm_before=True,
        final_norm=True,
        embedding_norm=False,
        embedding_multiplier=size**0.5 if config.flag("scale_embedding", True) else None,
        positions="sinusoidal",
        logits_bias=False,
        **plain_mlp(config, "relu", "activation_function"),
    )
