"""BERT (Devlin et al., 2018, arXiv:1810.04805) and encoders that are built alike: RoBERTa, DistilBERT, MPNet.

Learned positions and a norm over all embeddings; attention and a plain MLP, each added to what it read and then normed.
A classifier reads the state of the first token, through a dense layer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.arch import CheckpointNames, HeadArch, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    PLAIN_ACTIVATIONS,
    biases,
    either,
    layer_norm,
    read_arch,
    read_head_dim,
)
from quire.models.json_object import JsonObject

MAX_CLASSES = 1 << 20
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"

UNUSED = (
    r"(^|\.)embeddings\.position_ids$",
    r"(^|\.)pooler\.",
    r"^(cls|lm_head|mlm_head|vocab_\w+|decoder|head)\.",
    r"\.rotary_emb\.inv_freq$",
)
"""What an encoder need not compute: a vector that is made of the first token, and heads that guess masked tokens."""

EMBEDDINGS = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_token_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
_LAYERS = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "o_proj": "output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp": "",
    "up_proj": "intermediate.dense",
    "down_proj": "output.dense",
    "post_feedforward_layernorm": "output.LayerNorm",
}
_QKV = {"qkv_proj": ("self.query", "self.key", "self.value")}
_OF_MPNET = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "o_proj": "attn.o",
    "post_attention_layernorm": "attention.LayerNorm",
    "relative_bias": "encoder.relative_attention_bias",
}
_OF_DISTILBERT = {
    "layers": "transformer.layer",
    "self_attn": "attention",
    "o_proj": "out_lin",
    "post_attention_layernorm": "sa_layer_norm",
    "mlp": "ffn",
    "up_proj": "lin1",
    "down_proj": "lin2",
    "post_feedforward_layernorm": "output_layer_norm",
}
_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}
_FIRST_POSITION = 2
"""Of RoBERTa's positions, which count from behind that of padding."""


def read_bert(architecture: str, config: JsonObject, *, prefix: str = "bert", **differing: Any) -> ModelArch:
    """Tokens of two types; the dense layer in front of the classes is the model's own, its "pooler"."""
    fields = {
        "names": encoder_names(prefix, EMBEDDINGS | _LAYERS | pooler_names(prefix), _QKV),
        "token_types": config.integer("type_vocab_size", 2, high=MAX_WIDTH),
        "head": read_classifier(architecture, config, dense="tanh"),
    }
    return read_encoder(architecture, config, **(fields | differing))


def read_roberta(architecture: str, config: JsonObject) -> ModelArch:
    """RoBERTa (Liu et al., 2019, arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116) and CamemBERT (arXiv:1911.03894)."""
    head = read_classifier(architecture, config, dense="tanh")
    return read_bert(
        architecture,
        config,
        names=encoder_names("roberta", EMBEDDINGS | _LAYERS | classifier_names(head), _QKV),
        head=head,
        **_positions_behind_padding(config),
    )


def read_mpnet(architecture: str, config: JsonObject) -> ModelArch:
    """MPNet (Song et al., 2020, arXiv:2004.09297): scores are biased by distance."""
    head = read_classifier(architecture, config, dense="tanh")
    names = EMBEDDINGS | _LAYERS | _OF_MPNET | classifier_names(head)
    return read_encoder(
        architecture,
        config,
        names=encoder_names("mpnet", names, {"qkv_proj": ("attn.q", "attn.k", "attn.v")}),
        head=head,
        relative_buckets=config.integer("relative_attention_num_buckets", 32, high=MAX_WIDTH),
        **_positions_behind_padding(config),
    )


def read_distilbert(architecture: str, config: JsonObject) -> ModelArch:
    """DistilBERT (Sanh et al., 2019, arXiv:1910.01108): tokens of one type; sinusoidal positions are stored as well."""
    config = either(config, _DISTILBERT_KEYS)
    head = read_classifier(architecture, config, dense="relu")
    names = EMBEDDINGS | _OF_DISTILBERT | {"head": "", "dense": "pre_classifier", "out_proj": "classifier"}
    return read_encoder(
        architecture,
        config,
        names=encoder_names("distilbert", names, {"qkv_proj": ("q_lin", "k_lin", "v_lin")}),
        head=head,
    )


def read_encoder(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """What BERT's kind has in common; `differing` are the fields that a family has or reads otherwise."""
    config.only("is_decoder", False)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    fields = {
        "bidirectional": True,
        "block": "post_norm",
        "final_norm": False,
        "embedding_norm": True,
        "positions": "learned",
        "intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH),
        "num_kv_heads": heads,
        "head_dim": read_head_dim(config, heads),
        "tie_word_embeddings": False,
        "mlp": "plain",
        **layer_norm(config, default=1e-12),
        **biases(True),
    }
    fields |= differing
    if "hidden_act" not in fields:
        fields["hidden_act"] = config.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu")
    return read_arch(architecture, config, **fields)


def encoder_names(
    prefix: str, names: Mapping[str, str], merged: Mapping[str, tuple[str, ...]]
) -> CheckpointNames:
    """What a checkpoint calls things whose model stands under a prefix, which is missing in those without a head."""
    return CheckpointNames({"model": prefix, **names}, merged, UNUSED)


def pooler_names(prefix: str) -> dict[str, str]:
    """Of a head whose dense layer is the model's own."""
    return {"head": "", "dense": f"{prefix}.pooler.dense", "out_proj": "classifier"}


def classifier_names(head: HeadArch | None) -> dict[str, str]:
    """Of a head that is a module of two layers for texts, and one layer for tokens."""
    if head is not None and head.of_tokens:
        return {"head": "", "out_proj": "classifier"}
    return {"head": "classifier"}


def read_classifier(
    architecture: str, config: JsonObject, *, dense: str, pooling: str = "cls"
) -> HeadArch | None:
    """The head that an architecture's name says; one of tokens is a matrix alone."""
    if architecture.endswith(TOKENS):
        return HeadArch(_num_classes(config), of_tokens=True)
    if architecture.endswith(SEQUENCE):
        return HeadArch(_num_classes(config), pooling=pooling, dense=dense)
    return None


def _num_classes(config: JsonObject) -> int:
    names = config.child("id2label").values
    return len(names) if names else config.integer("num_labels", 2, high=MAX_CLASSES)


def _positions_behind_padding(config: JsonObject) -> dict[str, Any]:
    num_positions = config.integer("max_position_embeddings")
    if num_positions <= _FIRST_POSITION:
        raise config.wrong("max_position_embeddings", f"more than {_FIRST_POSITION}, which stand unused")
    config.only("pad_token_id", _FIRST_POSITION - 1)
    return {"position_offset": _FIRST_POSITION, "max_position_embeddings": num_positions - _FIRST_POSITION}
