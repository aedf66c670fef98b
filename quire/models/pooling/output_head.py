"""What a language model says by its own output head: how likely some tokens are, behind each step or a whole text.

Math-Shepherd (Wang et al., 2023, arXiv:2312.08935) gives rewards so, by a token for a good step and one for a bad one;
rerankers such as Qwen 3's (Zhang et al., 2025, arXiv:2506.05176) scores, by "yes" and "no". Invariant: torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.config.arch import ModelArch
from quire.config.pooling import HeadLayer, PoolingSpec
from quire.errors import ConfigError
from quire.models.json_object import JsonObject
from quire.pooling_params import TOKEN_CLASSIFY

_KEY = "returned_token_ids"
TOKENS = "classifier_from_token"
"""The key of config.json, or of --hf-overrides, that makes classes of tokens."""
_QWEN = "is_original_qwen3_reranker"
_TWO_WAYS, _EACH = "from_2_way_softmax", "no_post_processing"
IdOf = Callable[[str], int | None]
"""A token's id by its name in the vocabulary."""


def by_output_head(arch: ModelArch, pooler_config: dict[str, Any]) -> tuple[PoolingSpec, dict[str, Any]]:
    """Classes that are tokens, and what else a user says.

    Raises:
        ConfigError: they are no tokens of the model, or its logits are more than a product and a bias.
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


def by_tokens(arch: ModelArch, file: JsonObject, id_of: IdOf) -> HeadLayer:
    """The head that config.json makes of the logits of tokens behind a whole text.

    Of two, [no, yes], it is by how much the second one's is greater: the logarithm of how much likelier it is.

    Raises:
        ConfigError: the model's logits are more than a product and a bias.
        ModelLoadError: a value is none that its key may have.
    """
    words = file.texts(TOKENS)
    way = file.choice("method", (_TWO_WAYS, _EACH), _TWO_WAYS if file.flag(_QWEN, False) else _EACH)
    ids = [token for token in map(id_of, words) if token is not None]
    if not words or len(ids) < len(words):
        raise file.wrong(TOKENS, "a list of tokens of the vocabulary")
    if way == _EACH:
        return _head(arch, ids, TOKENS)
    if len(ids) != 2:
        raise file.wrong(TOKENS, f"a list of two tokens, no and yes, as {_TWO_WAYS} wants")
    return _excess(_head(arch, ids, TOKENS))


def by_answers(arch: ModelArch, ids: tuple[int, ...]) -> HeadLayer:
    """The head that gives the logit of a token, [yes], or by how much that of the second is greater, [no, yes].

    Raises:
        ConfigError: the model's logits are more than a product and a bias, or it has no such tokens.
    """
    if max(ids) >= arch.vocab_size:
        raise ConfigError(f"LogitScore: the model has {arch.vocab_size} tokens, and none of id {max(ids)}")
    head = _head(arch, list(ids), "LogitScore")
    return head if len(ids) == 1 else _excess(head)


def _excess(head: HeadLayer) -> HeadLayer:
    return replace(head, activation="excess")


def _head(arch: ModelArch, tokens: list[int], what: str) -> HeadLayer:
    if arch.logits_multiplier != 1.0 or arch.final_logit_softcap is not None or arch.head_of_unit_rows:
        raise ConfigError(
            f"{what} needs logits that are a plain product, and {arch.architecture}'s are scaled"
        )
    return HeadLayer(
        _name_of(arch),
        arch.word_embed_proj_dim or arch.hidden_size,
        len(tokens),
        bias=arch.head_bias and not arch.tie_word_embeddings,
        rows=tuple(tokens),
        num_stored=arch.vocab_size,
    )


def _name_of(arch: ModelArch) -> str:
    """What the checkpoint calls the output head, or the table that is it."""
    renamed = arch.names.renamed
    parts = ("model", "embed_tokens") if arch.tie_word_embeddings else ("lm_head",)
    return ".".join(filter(None, (renamed.get(part, part) for part in parts)))
