# SPDX-License-Identifier: Apache-2.0
"""Models of published shapes with random weights, and the requests to them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import quire

TOKENIZER = Path(quire.__path__[0]) / "assets" / "quire-demo-embed" / "tokenizer.json"
VOCAB_SIZE, LONGEST = 2304, 512
SEED = 1


class Shape(NamedTuple):
    """A class of transformers, and the keys of its configuration."""

    class_name: str
    keys: dict[str, Any]
    pooling: str = "mean"


def _bert(class_name: str, layers: int, hidden: int, **more: Any) -> Shape:
    keys = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": 12,
        "max_position_embeddings": LONGEST,
        "pad_token_id": 0,
    }
    return Shape(class_name, keys | more)


SHAPES = {
    "tiny": _bert("BertModel", 2, 48),
    "minilm": _bert("BertModel", 6, 384),
    "bert-base": _bert("BertModel", 12, 768),
    "cross-encoder": _bert("BertForSequenceClassification", 6, 384, num_labels=1),
    "qwen3-embedding": Shape(
        "Qwen3Model",
        {
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": LONGEST,
            "tie_word_embeddings": True,
        },
        "lasttoken",
    ),
}
"""By what people call them; the vocabulary is small, since it is only looked up."""


class Load(NamedTuple):
    """So many texts of random lengths, and what is told of them: seconds, or texts per second."""

    num_texts: int
    shortest: int
    longest: int


LOADS = {
    "texts": Load(2000, 8, 256),
    "one": Load(1, 16, 16),
    "documents": Load(100, 128, 128),
    "passages": Load(256, 128, 128),
}


def write_model(shape: Shape, directory: Path) -> None:
    """A checkpoint as transformers, and sentence-transformers, save it."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    cls = getattr(transformers, shape.class_name)
    model = cls(cls.config_class(**shape.keys)).float().eval()
    model.save_pretrained(directory)
    shutil.copy(TOKENIZER, directory)
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "model_max_length": LONGEST,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    if not shape.class_name.endswith("Classification"):
        _write_sentence_transformer(shape, directory)


def _write_sentence_transformer(shape: Shape, directory: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": mode == shape.pooling for mode in ("cls_token", "lasttoken")}
    flags["pooling_mode_mean_tokens"] = shape.pooling == "mean"
    about = {"word_embedding_dimension": shape.keys["hidden_size"], **flags}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(about))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))


def texts_of(load: Load, seed: int) -> list[str]:
    """Random texts of so many tokens, as far as tokens that are joined stay what they were."""
    from tokenizers import Tokenizer

    tokenizer, draw = Tokenizer.from_file(str(TOKENIZER)), random.Random(seed)
    words = sorted(
        {text for token, text in _words(tokenizer) if len(tokenizer.encode(text).ids) == 1 and token}
    )
    lengths = [draw.randint(load.shortest, load.longest) for _ in range(load.num_texts)]
    return ["".join(draw.choices(words, k=length)) for length in lengths]


def _words(tokenizer: Any) -> list[tuple[str, str]]:
    """Tokens that begin with a space and go on with letters, and what they are as text."""
    decoded = [(token, tokenizer.decode([number])) for token, number in tokenizer.get_vocab().items()]
    return [(token, text) for token, text in decoded if text[:1] == " " and text[1:].isalpha()]
