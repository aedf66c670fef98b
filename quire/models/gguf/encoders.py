"""Encoders in GGUF: BERT and what converters write under its name (XLM-RoBERTa, MiniLM, E5, BGE).

Invariant: torch-free; see `architectures`.
"""

from __future__ import annotations

from quire.errors import ModelLoadError
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import Config, named
from quire.models.gguf.tensor_names import Places

BERT_PLACES: Places = {
    "token_types": "model.embed_token_types",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}


def bert(model: GgufModel) -> Config:
    """Positions are those of the table: converters leave out the rows of RoBERTa that stand for padding."""
    tables = {"type_vocab_size": "token_types.weight", "max_position_embeddings": "position_embd.weight"}
    missing = [name for name in tables.values() if name not in model.tensors]
    if missing:
        raise ModelLoadError(f"{model.path}: tensor {missing[0]!r} is missing")
    rows = {key: model.tensors[name][1].shape[0] for key, name in tables.items()}
    model.own.get("context_length")
    return named(model, _SIZES) | rows | {"architectures": ["BertModel"]}
