"""Reads what sentence-transformers, and PyLate before it, say of models whose texts are matched token by token.

Invariant: torch-free. What is read changes which tokens of two texts are matched, and never a token's vector. What is
not done is told in the log, since vectors of texts as they are come out right without it.
"""

from __future__ import annotations

import logging
import string
from dataclasses import dataclass
from pathlib import Path

from quire.models.json_object import JsonObject, optional_json_object

logger = logging.getLogger(__name__)

MASK = "MultiVectorMask"
SIMILARITIES = ("maxsim", "meanmaxsim")
_PYLATE = "ColBERT"
_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
Prompts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LateInteraction:
    """How texts are matched; Khattab and Zaharia, 2020, arXiv:2004.12832."""

    prompts: Prompts
    is_normalized: bool
    """Whether vectors get the length 1 though no module says so."""
    skipped_words: tuple[str, ...] = ()
    """Tokens of documents that nothing is matched with."""
    side_lengths: tuple[int | None, int | None] = (None, None)
    """Tokens to which queries and documents are cut."""


def read_late_interaction(
    model_dir: Path, about: JsonObject, prompts: Prompts, mask: str | None
) -> LateInteraction:
    """What the files say; `mask` is the folder of the module that says what is matched, None: there is none.

    Raises:
        ModelLoadError: a file is malformed.
        UnsupportedModelError: something is asked for that is not done.
    """
    is_pylate = about.get("model_type") == _PYLATE
    lengths = about if is_pylate else optional_json_object(model_dir / "sentence_bert_config.json")
    _tell_of_expansion(about, lengths, is_pylate=is_pylate)
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
    """PyLate puts a prefix before a prompt."""
    found = dict(prompts)
    for name, key in _PREFIXES.items():
        prefix = about.text(key, "")
        found[name] = prefix + found.get(name, "").removeprefix(prefix)
    return tuple(found.items())


def _tell_of_expansion(about: JsonObject, lengths: JsonObject, *, is_pylate: bool) -> None:
    is_expanded = about.flag("do_query_expansion", True) if is_pylate else "query_expansion" in lengths
    if is_expanded:
        logger.warning(
            "%s: queries are made longer by masked tokens there, and here they are what they are",
            about.where if is_pylate else lengths.where,
        )
