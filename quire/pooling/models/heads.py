# SPDX-License-Identifier: Apache-2.0
"""Heads after hidden states: classification, reward, token scores, SPLADE and late interaction.

Invariant: torch-free. Only models on a language model's row get heads from here; others bring their own.

- Token scores: how likely some tokens are after each step or the whole text. Math-Shepherd (Wang et al., 2023,
  arXiv:2312.08935) gives rewards so; Qwen 3 rerankers (Zhang et al., 2025, arXiv:2506.05176) score by "yes" and "no".
- SPLADE (Formal et al., 2021, arXiv:2107.05720 and arXiv:2109.10086): per vocabulary word the sum or maximum over
  tokens of log(1 + relu(logit)) of the masked-LM head, whose weight is the token table.
- Late interaction: settings of sentence-transformers and PyLate; they decide which tokens are matched, never a vector.
  Unsupported ones are logged, because embeddings are right without them.
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.arch import HeadArch, ModelArch
from quire.config.pooling import HeadLayer, PoolingSpec
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.checkpoint_files import has_file, size_of
from quire.models.families.fields import PLAIN_ACTIVATIONS
from quire.models.gguf.model import is_gguf
from quire.models.json_object import JsonObject, optional_json_object, read_json_object
from quire.pooling_params import TOKEN_CLASSIFY

logger = logging.getLogger(__name__)

_KEY = "returned_token_ids"
TOKENS = "classifier_from_token"
"""Key of config.json or --hf-overrides that turns tokens into classes."""
_QWEN = "is_original_qwen3_reranker"
_TWO_WAYS, _EACH = "from_2_way_softmax", "no_post_processing"
IdOf = Callable[[str], int | None]
"""Returns a token's id by its name in the vocabulary."""


def classes_of_output_head(
    arch: ModelArch, pooler_config: dict[str, Any]
) -> tuple[PoolingSpec, dict[str, Any]]:
    """Return a spec whose classes are tokens, and the rest of `--pooler-config`.

    Raises:
        ConfigError: unknown tokens, or logits that are more than a linear layer.
    """
    tokens = pooler_config[_KEY]
    is_list = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
    if not is_list or not all(0 <= token < arch.vocab_size for token in tokens):
        raise ConfigError(
            f"--pooler-config: {_KEY} must be a list of token ids in [0, {arch.vocab_size - 1}], got {tokens!r:.80}"
        )
    head = _head(arch, tokens, f"--pooler-config: {_KEY}")
    labels = tuple(map(str, tokens))
    spec = PoolingSpec((TOKEN_CLASSIFY,), "all", len(tokens), labels, "softmax", head=(head,))
    return spec, {key: value for key, value in pooler_config.items() if key != _KEY}


def head_of_tokens(arch: ModelArch, file: JsonObject, id_of: IdOf) -> HeadLayer:
    """Return the head that config.json makes of the logits of tokens after a whole text.

    For two, [no, yes], it is their difference, the log odds of yes.

    Raises:
        ConfigError: the model's logits are more than a linear layer.
        ModelLoadError: an invalid value.
    """
    words = file.texts(TOKENS)
    way = file.choice("method", (_TWO_WAYS, _EACH), _TWO_WAYS if file.flag(_QWEN, False) else _EACH)
    ids = [token for token in map(id_of, words) if token is not None]
    if not words or len(ids) < len(words):
        raise file.wrong(TOKENS, "a list of tokens of the vocabulary")
    if way == _EACH:
        return _head(arch, ids, TOKENS)
    if len(ids) != 2:
        raise file.wrong(TOKENS, f"a list of two tokens, no and yes, for {_TWO_WAYS}")
    return _excess(_head(arch, ids, TOKENS))


def head_of_answers(arch: ModelArch, ids: tuple[int, ...]) -> HeadLayer:
    """Return the head that gives the logit of [yes], or the difference for [no, yes].

    Raises:
        ConfigError: the model's logits are more than a linear layer, or it has no such tokens.
    """
    if max(ids) >= arch.vocab_size:
        raise ConfigError(
            f"LogitScore: token id {max(ids)} is outside the vocabulary of {arch.vocab_size} tokens"
        )
    head = _head(arch, list(ids), "LogitScore")
    return head if len(ids) == 1 else _excess(head)


def _excess(head: HeadLayer) -> HeadLayer:
    return replace(head, activation="excess")


def _head(arch: ModelArch, tokens: list[int], what: str) -> HeadLayer:
    if arch.logits_multiplier != 1.0 or arch.final_logit_softcap is not None or arch.head_of_unit_rows:
        raise ConfigError(f"{what} needs logits of a plain linear layer, but {arch.architecture} scales them")
    return HeadLayer(
        _name_of(arch),
        arch.word_embed_proj_dim or arch.hidden_size,
        len(tokens),
        bias=arch.head_bias and not arch.tie_word_embeddings,
        rows=tuple(tokens),
        num_stored=arch.vocab_size,
    )


def _name_of(arch: ModelArch) -> str:
    """Return the checkpoint's name of the output head, or of the tied table."""
    renamed = arch.names.renamed
    parts = ("model", "embed_tokens") if arch.tie_word_embeddings else ("lm_head",)
    return ".".join(filter(None, (renamed.get(part, part) for part in parts)))


_MASKED = "ForMaskedLM"


class _MaskedLMHead(NamedTuple):
    """Names of a family's masked-LM head."""

    renamed: Mapping[str, str]
    bias: str
    own_keys: bool = False
    """True if config.json describes its dense layer separately, as a classifier's; else it is as in an MLP."""


_BERT = _MaskedLMHead(
    {
        "head": "cls.predictions",
        "dense": "transform.dense",
        "dense_norm": "transform.LayerNorm",
        "out_proj": "decoder",
    },
    "cls.predictions.bias",
)
_ROBERTA = _MaskedLMHead(
    {"head": "lm_head", "dense": "dense", "dense_norm": "layer_norm", "out_proj": "decoder"}, "lm_head.bias"
)
_DISTILBERT = _MaskedLMHead(
    {"head": "", "dense": "vocab_transform", "dense_norm": "vocab_layer_norm", "out_proj": "vocab_projector"},
    "vocab_projector.bias",
)
_MODERN_BERT = _MaskedLMHead({"out_proj": "decoder"}, "decoder.bias", own_keys=True)
_MASKED_HEADS = {
    "Bert": _BERT,
    "Camembert": _ROBERTA,
    "DistilBert": _DISTILBERT,
    "ModernBert": _MODERN_BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
}


def with_vocabulary_head(arch: ModelArch, config: JsonObject) -> ModelArch:
    """Return the encoder's architecture with its masked-LM head.

    Raises:
        UnsupportedModelError: its checkpoint has none, or an unknown one.
    """
    family = arch.architecture.removesuffix(_MASKED)
    if not arch.architecture.endswith(_MASKED) or family not in _MASKED_HEADS:
        known = ", ".join(f"{name}{_MASKED}" for name in _MASKED_HEADS)
        raise UnsupportedModelError(
            f"SpladePooling needs one of {known}, but the checkpoint is {arch.architecture}"
        )
    made = _MASKED_HEADS[family]
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


HEADS = ("score", "classifier", "pre_classifier", "v_head")  # module names of heads
_INDEX, _MAX_HEADER_BYTES = "model.safetensors.index.json", 100_000_000


def has_head(model_dir: Path) -> bool:
    """Return whether any tensor is of a head; True for GGUF.

    Raises:
        ModelLoadError: a list of tensors is malformed.
    """
    if is_gguf(model_dir):
        return True
    return any(name.partition(".")[0] in HEADS for name in _tensor_names(model_dir))


def _tensor_names(model_dir: Path) -> set[str]:
    if has_file(model_dir / _INDEX):
        return {*read_json_object(model_dir / _INDEX).child("weight_map").values}
    return {name for path in model_dir.glob("*.safetensors") for name in _names_in(path)}


def _names_in(path: Path) -> set[str]:
    """Return the tensor names of a safetensors file: 8 bytes with the size of a JSON header, whose keys they are."""
    size_of(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot read the header: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: its header is not a JSON object")
    return {*header}


MASK = "MultiVectorMask"
SIMILARITIES = ("maxsim", "meanmaxsim")
_PYLATE = "ColBERT"
_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
Prompts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LateInteraction:
    """Settings of late interaction; Khattab and Zaharia, 2020, arXiv:2004.12832."""

    prompts: Prompts
    is_normalized: bool
    """True if vectors are normalized without a module for it."""
    skipped_words: tuple[str, ...] = ()
    """Tokens of documents that are not matched."""
    side_lengths: tuple[int | None, int | None] = (None, None)
    """Tokens to which queries and documents are truncated."""


def read_late_interaction(
    model_dir: Path, about: JsonObject, prompts: Prompts, mask: str | None
) -> LateInteraction:
    """Read the settings; `mask` is the folder of the masking module, None: there is none.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: a setting is not supported.
    """
    is_pylate = about.get("model_type") == _PYLATE
    lengths = about if is_pylate else optional_json_object(model_dir / "sentence_bert_config.json")
    _warn_of_expansion(about, lengths, is_pylate=is_pylate)
    skipped: tuple[str, ...] = tuple(string.punctuation) if is_pylate else ()
    if "skiplist_words" in about and is_pylate:
        skipped = about.texts("skiplist_words")
    if mask is not None:
        skipped = _masked(optional_json_object(model_dir / mask / "config.json"))
    return LateInteraction(
        _with_prefixes(about, prompts) if is_pylate else prompts,
        is_pylate,
        skipped,
        (lengths.optional_integer("query_length"), lengths.optional_integer("document_length")),
    )


def _masked(config: JsonObject) -> tuple[str, ...]:
    config.only("skiplist_tasks", ["document"])
    config.only("keep_only_token_ids", [])
    return config.texts("skiplist_words") if "skiplist_words" in config else ()


def _with_prefixes(about: JsonObject, prompts: Prompts) -> Prompts:
    """Return the prompts with PyLate's prefixes."""
    found = dict(prompts)
    for name, key in _PREFIXES.items():
        prefix = about.text(key, "")
        found[name] = prefix + found.get(name, "").removeprefix(prefix)
    return tuple(found.items())


def _warn_of_expansion(about: JsonObject, lengths: JsonObject, *, is_pylate: bool) -> None:
    is_expanded = about.flag("do_query_expansion", True) if is_pylate else "query_expansion" in lengths
    if is_expanded:
        logger.warning(
            "%s: query expansion with mask tokens is not supported; queries are embedded as they are",
            about.where if is_pylate else lengths.where,
        )


MAX_CLASSES = 1 << 20

_CLASSES_BY_DEFAULT = {"reward": 1, "process_reward": 2}
"""Classes if config.json has neither num_labels nor id2label; elsewhere two, as in transformers."""
_BY_PROBLEM = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
_BY_FUNCTION = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_CLASSIFIERS = ("GPT2", "GPTBigCode", "GPTNeo", "GPTNeoX", "Bloom", "Falcon", "Mpt")
"""Families whose token classifiers are named `classifier`."""


def classes(file: JsonObject, target: str, function: str = "") -> tuple[tuple[str, ...], str]:
    """Return the names of a head's classes and their activation.

    function: activation given by another file, by its name in torch.
    """
    names = file.child("id2label")
    count = file.integer(
        "num_labels", len(names.values) or _CLASSES_BY_DEFAULT.get(target, 2), high=MAX_CLASSES
    )
    if names.values and names.values.keys() != {str(index) for index in range(count)}:
        raise ModelLoadError(f"{file.where}: id2label must name the classes 0 to {count - 1}")
    labels = tuple(names.text(str(index)) if names.values else f"LABEL_{index}" for index in range(count))
    return labels, "none" if target == "reward" else _activation(file, count, function)


def _activation(file: JsonObject, count: int, function: str) -> str:
    own = file.child("sentence_transformers").text("activation_fn", "")
    function = function or own or file.text("sbert_ce_default_activation_function", "")
    if function:
        name = function.rpartition(".")[2]
        if name not in _BY_FUNCTION:
            raise ModelLoadError(
                f"{file.where}: the cross-encoder's activation is {function!r}; it must be torch's "
                f"{', '.join(_BY_FUNCTION)}"
            )
        return _BY_FUNCTION[name]
    if "problem_type" in file:
        return _BY_PROBLEM[file.choice("problem_type", tuple(_BY_PROBLEM))]
    return "sigmoid" if count == 1 else "softmax"


Head = tuple[HeadLayer, ...]


def _two_layers(width: int, count: int) -> Head:
    """Return Qwen 2.5's reward head (Yang et al., 2024, arXiv:2409.12122)."""
    return (HeadLayer("score.0", width, width, activation="relu"), HeadLayer("score.2", width, count))


def _value(width: int, count: int) -> Head:
    """Return InternLM 2's reward head (Cai et al., 2024, arXiv:2403.17297)."""
    return (HeadLayer("v_head", width, count, bias=False),)


_OWN: dict[str, Callable[[int, int], Head]] = {
    "Qwen2ForRewardModel": _two_layers,
    "Qwen2ForProcessRewardModel": _two_layers,
    "InternLM2ForRewardModel": _value,
}


def head_of(architecture: str, target: str, width: int, count: int) -> Head:
    """Return the layers from hidden states [N, width] to `count` numbers, with the checkpoint's names."""
    if architecture in _OWN:
        return _OWN[architecture](width, count)
    if target == "token_classify":
        stem = architecture.removesuffix("ForTokenClassification")
        return (HeadLayer("classifier" if stem in _CLASSIFIERS else "score", width, count),)
    return (HeadLayer("score", width, count, bias=False),)
