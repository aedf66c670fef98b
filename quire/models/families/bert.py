# SPDX-License-Identifier: Apache-2.0
"""BERT (Devlin et al., 2018, arXiv:1810.04805) and similar encoders: RoBERTa, DistilBERT, MPNet, and with rotary
positions NomicBERT, GTE, Jina embeddings v3 and ModernBERT.

BERT has learned positions and a norm over all embeddings; attention and a plain MLP, each followed by residual addition
and norm. A classifier reads the first token's state through a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.arch import CheckpointNames, HeadArch, ModelArch
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    PLAIN_ACTIVATIONS,
    biases,
    either,
    layer_kinds,
    layer_norm,
    read_arch,
    read_head_dim,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

MAX_CLASSES = 1 << 20
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"

UNUSED = (
    r"(^|\.)embeddings\.position_ids$",
    r"(^|\.)pooler\.",
    r"^(cls|lm_head|mlm_head|vocab_\w+|decoder|head)\.",
    r"\.rotary_emb\.inv_freq$",
)
"""Tensors that an encoder does not need: poolers and masked-language-model heads."""

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
_MPNET_NAMES = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "o_proj": "attn.o",
    "post_attention_layernorm": "attention.LayerNorm",
    "relative_bias": "encoder.relative_attention_bias",
}
_DISTILBERT_NAMES = {
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
"""First position of RoBERTa, after that of padding."""


def read_bert(architecture: str, config: JsonObject, *, prefix: str = "bert", **differing: Any) -> ModelArch:
    """Two token types; the dense layer before the classifier is the model's own "pooler"."""
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
    names = EMBEDDINGS | _LAYERS | _MPNET_NAMES | classifier_names(head)
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
    names = EMBEDDINGS | _DISTILBERT_NAMES | {"head": "", "dense": "pre_classifier", "out_proj": "classifier"}
    return read_encoder(
        architecture,
        config,
        names=encoder_names("distilbert", names, {"qkv_proj": ("q_lin", "k_lin", "v_lin")}),
        head=head,
    )


def read_encoder(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Read the fields that BERT-like encoders share; `differing` replaces fields of a family."""
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
    """Return checkpoint names under a prefix, which checkpoints without a head omit."""
    return CheckpointNames({"model": prefix, **names}, merged, UNUSED)


def pooler_names(prefix: str) -> dict[str, str]:
    """Return names of a head whose dense layer is the model's pooler."""
    return {"head": "", "dense": f"{prefix}.pooler.dense", "out_proj": "classifier"}


def classifier_names(head: HeadArch | None) -> dict[str, str]:
    """Return names of a head with two layers for texts and one layer for tokens."""
    if head is not None and head.of_tokens:
        return {"head": "", "out_proj": "classifier"}
    return {"head": "classifier"}


def read_classifier(
    architecture: str, config: JsonObject, *, dense: str, pooling: str = "cls"
) -> HeadArch | None:
    """Return the head that the architecture's name implies; one for tokens is a single linear layer."""
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
        raise config.wrong("max_position_embeddings", f"more than {_FIRST_POSITION}, which are unused")
    config.only("pad_token_id", _FIRST_POSITION - 1)
    return {"position_offset": _FIRST_POSITION, "max_position_embeddings": num_positions - _FIRST_POSITION}


_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_emb_fraction",
    "max_position_embeddings": "max_trained_positions",
}
_GLU = {"swiglu": "silu", "geglu": "gelu", "silu": "silu", "gelu": "gelu"}
_NOMIC_NAMES = {
    "embed_norm": "emb_ln",
    "layers": "encoder.layers",
    "self_attn": "attn",
    "qkv_proj": "Wqkv",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm1",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "post_feedforward_layernorm": "norm2",
}
_GTE_NAMES = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "post_attention_layernorm": "attn_ln",
    "gate_up_proj": "up_gate_proj",
    "post_feedforward_layernorm": "mlp_ln",
}
_MODERN_BERT_NAMES = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "input_layernorm": "attn_norm",
    "self_attn": "attn",
    "qkv_proj": "Wqkv",
    "o_proj": "Wo",
    "post_attention_layernorm": "mlp_norm",
    "gate_up_proj": "Wi",
    "down_proj": "Wo",
    "norm": "final_norm",
    "head": "",
    "dense": "head.dense",
    "dense_norm": "head.norm",
    "out_proj": "classifier",
}


def read_nomic_bert(architecture: str, config: JsonObject) -> ModelArch:
    """NomicBERT (Nussbaum et al., 2024, arXiv:2402.01613): a gated MLP; contexts end where it was trained to."""
    config = either(config, _NOMIC_KEYS)
    for key in ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved"):
        config.only(key, False)
    key = "activation_function" if "activation_function" in config else "hidden_act"
    names = EMBEDDINGS | _NOMIC_NAMES | pooler_names("nomic_bert")
    return read_encoder(
        architecture,
        config,
        names=replace(
            encoder_names("nomic_bert", names, {"gate_up_proj": ("fc12", "fc11")}),
            adapters=_in_transformers(EMBEDDINGS | pooler_names("nomic_bert") | {"model": "nomic_bert"}),
        ),
        token_types=config.integer("type_vocab_size", 2, high=MAX_WIDTH),
        positions=None,
        rope=read_rope(config, head_dim=_head_dim(config), theta=1000.0),
        mlp="gated",
        hidden_act=_GLU[config.choice(key, tuple(_GLU), "silu")],
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        head=read_classifier(architecture, config, dense="tanh"),
        **biases(qkv=config.flag("qkv_proj_bias", False), mlp=config.flag("mlp_fc1_bias", False)),
    )


def read_gte(architecture: str, config: JsonObject) -> ModelArch:
    """GTE (Zhang et al., 2024, arXiv:2407.19669): a gated MLP whose tensor has up before gate."""
    config.only("layer_norm_type", "layer_norm")
    config.only("logn_attention_scale", False)
    config.only("pack_qkv", True)
    prefix = "new" if architecture.startswith("New") else "gte"
    names = EMBEDDINGS | _GTE_NAMES | pooler_names(prefix)
    return read_encoder(
        architecture,
        config,
        names=replace(
            encoder_names(prefix, names, {}),
            adapters=_in_transformers(EMBEDDINGS | pooler_names(prefix) | {"model": prefix}),
        ),
        token_types=config.integer("type_vocab_size", 1, low=0, high=MAX_WIDTH),
        positions=None,
        rope=read_rope(config, head_dim=_head_dim(config), theta=160_000.0),
        mlp="gated",
        up_first=True,
        mlp_out_bias=True,
        hidden_act=config.choice("hidden_act", GATED_ACTIVATIONS, "gelu"),
        head=read_classifier(architecture, config, dense="tanh"),
        **biases(qkv=True, out=True),
    )


def read_jina_v3(architecture: str, config: JsonObject) -> ModelArch:
    """Jina embeddings v3 (Sturua et al., 2024, arXiv:2409.10173) without adapters: XLM-RoBERTa, rotated."""
    head = read_classifier(architecture, config, dense="tanh")
    names = EMBEDDINGS | _NOMIC_NAMES | classifier_names(head)
    names["self_attn"] = "mixer"
    return read_encoder(
        architecture,
        config,
        names=replace(
            encoder_names("roberta", names, {}),
            adapters=_in_transformers(
                EMBEDDINGS
                | classifier_names(head)
                | {"model": "roberta", "up_proj": "fc1", "down_proj": "fc2"}
            ),
        ),
        token_types=config.integer("type_vocab_size", 1, high=MAX_WIDTH),
        positions=None,
        rope=read_rope(config, head_dim=_head_dim(config), theta=20_000.0),
        head=head,
        **layer_norm(config, default=1e-5),
    )


def read_modern_bert(architecture: str, config: JsonObject) -> ModelArch:
    """ModernBERT (Warner et al., 2024, arXiv:2412.13663): norms before attention and MLP; windows on most layers.

    Norms and linear layers have no biases. The first layer's attention reads the output of the embeddings' norm.
    """
    period = config.integer("global_attn_every_n_layers", 3, high=MAX_LAYERS)
    head_dim = _head_dim(config)
    full, local = (
        config.with_values(rope_theta=config.number(key, theta, low=1.0))
        for key, theta in (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))
    )
    return read_encoder(
        architecture,
        config,
        names=encoder_names("model", _MODERN_BERT_NAMES, {}),
        block="sequential",
        first_block="normed_input",
        final_norm=True,
        norm_bias=config.flag("norm_bias", False),
        positions=None,
        rope=read_rope(full, head_dim=head_dim),
        rope_local=read_rope(local, head_dim=head_dim, layer_type=SLIDING),
        layer_types=layer_kinds(
            config, {FULL: FULL, SLIDING: SLIDING}, lambda layer: SLIDING if layer % period else FULL
        ),
        sliding_window=config.integer("local_attention", 128) // 2 + 1,
        mlp="gated",
        hidden_act=config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu"),
        head=_modern_head(architecture, config),
        **layer_norm(config, "norm_eps", 1e-5),
        **_modern_biases(config),
    )


def _in_transformers(names: dict[str, str]) -> CheckpointNames:
    """Names as in transformers, which converts stored names to Llama's."""
    return CheckpointNames(names)


def _modern_head(architecture: str, config: JsonObject) -> HeadArch | None:
    """A dense layer and a norm before the classifier, for texts and for tokens."""
    pooling = config.choice("classifier_pooling", ("cls", "mean"), "cls")
    activation = config.choice("classifier_activation", ("gelu", "relu", "silu", "tanh"), "gelu")
    head = read_classifier(architecture, config, dense=activation, pooling=pooling)
    bias = config.flag("classifier_bias", False)
    return None if head is None else replace(head, dense=activation, dense_bias=bias, norm=True)


def _modern_biases(config: JsonObject) -> dict[str, bool]:
    attention = config.flag("attention_bias", False)
    return biases(qkv=attention, out=attention, mlp=config.flag("mlp_bias", False))


def _head_dim(config: JsonObject) -> int:
    return read_head_dim(config, config.integer("num_attention_heads"))
