"""Encoders whose positions are rotations: NomicBERT, GTE, Jina embeddings v3 and ModernBERT."""

from __future__ import annotations

from dataclasses import replace

from quire.config.arch import CheckpointNames, HeadArch, ModelArch
from quire.models.families.bert import (
    EMBEDDINGS,
    classifier_names,
    encoder_names,
    pooler_names,
    read_classifier,
    read_encoder,
)
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    layer_kinds,
    layer_norm,
    read_head_dim,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

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
_OF_NOMIC = {
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
_OF_GTE = {
    "layers": "encoder.layer",
    "self_attn": "attention",
    "post_attention_layernorm": "attn_ln",
    "gate_up_proj": "up_gate_proj",
    "post_feedforward_layernorm": "mlp_ln",
}
_OF_MODERN_BERT = {
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
    names = EMBEDDINGS | _OF_NOMIC | pooler_names("nomic_bert")
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
    names = EMBEDDINGS | _OF_GTE | pooler_names(prefix)
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
    names = EMBEDDINGS | _OF_NOMIC | classifier_names(head)
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

    Norms and matrices have no biases. The first layer's attention reads what the embeddings' norm gave.
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
        names=encoder_names("model", _OF_MODERN_BERT, {}),
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
    """Where transformers has Llama's modules, and brings what it reads into their form."""
    return CheckpointNames(names)


def _modern_head(architecture: str, config: JsonObject) -> HeadArch | None:
    """A dense layer and a norm stand before the classes, of texts and of tokens."""
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
