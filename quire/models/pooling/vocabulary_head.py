"""Encoders that weigh all words of their vocabulary, by the heads with which they guess masked tokens (SPLADE).

Formal et al., 2021, arXiv:2107.05720 and arXiv:2109.10086: of each word the sum, or the greatest, of what the tokens of
a text give it, log(1 + relu(logit)). Invariant: torch-free. The matrix of such a head is the table of tokens, which is
stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from quire.config.arch import HeadArch, ModelArch
from quire.errors import UnsupportedModelError
from quire.models.families.fields import PLAIN_ACTIVATIONS
from quire.models.json_object import JsonObject

_MASKED = "ForMaskedLM"


class _Head(NamedTuple):
    """What a family's checkpoints call the parts of such a head, and its bias."""

    renamed: Mapping[str, str]
    bias: str
    own_keys: bool = False
    """Whether config.json says apart, as of a classifier, how its dense layer is made; else it is as an MLP's."""


_OF_BERT = _Head(
    {
        "head": "cls.predictions",
        "dense": "transform.dense",
        "dense_norm": "transform.LayerNorm",
        "out_proj": "decoder",
    },
    "cls.predictions.bias",
)
_OF_ROBERTA = _Head(
    {"head": "lm_head", "dense": "dense", "dense_norm": "layer_norm", "out_proj": "decoder"}, "lm_head.bias"
)
_OF_DISTILBERT = _Head(
    {
        "head": "",
        "dense": "vocab_transform",
        "dense_norm": "vocab_layer_norm",
        "out_proj": "vocab_projector",
    },
    "vocab_projector.bias",
)
_OF_MODERN_BERT = _Head({"out_proj": "decoder"}, "decoder.bias", own_keys=True)
_HEADS = {
    "Bert": _OF_BERT,
    "Camembert": _OF_ROBERTA,
    "DistilBert": _OF_DISTILBERT,
    "ModernBert": _OF_MODERN_BERT,
    "Roberta": _OF_ROBERTA,
    "XLMRoberta": _OF_ROBERTA,
}


def with_vocabulary_head(arch: ModelArch, config: JsonObject) -> ModelArch:
    """The encoder of such a config.json with its head for masked tokens.

    Raises:
        UnsupportedModelError: its checkpoint has none, or one of another form.
    """
    family = arch.architecture.removesuffix(_MASKED)
    if not arch.architecture.endswith(_MASKED) or family not in _HEADS:
        known = ", ".join(f"{name}{_MASKED}" for name in _HEADS)
        raise UnsupportedModelError(
            f"SpladePooling needs one of {known}, and the checkpoint is of {arch.architecture}"
        )
    made = _HEADS[family]
    renamed = {**arch.names.renamed, **made.renamed}
    table = ".".join(filter(None, (renamed.get(part, part) for part in ("model", "embed_tokens"))))
    head = HeadArch(
        arch.vocab_size,
        of_tokens=True,
        dense=arch.hidden_act,
        norm=True,
        table=f"{table}.weight",
        table_bias=made.bias,
    )
    if made.own_keys:
        config.only("decoder_bias", True)
        head = replace(
            head,
            dense=config.choice("classifier_activation", PLAIN_ACTIVATIONS, "gelu"),
            dense_bias=config.flag("classifier_bias", False),
        )
    return replace(arch, head=head, names=replace(arch.names, renamed=renamed))
