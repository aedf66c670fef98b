"""Weights of words in replies, as BGE-M3 gives them (Chen et al., 2024, arXiv:2402.03216): an object for each text.

Invariant: a word counts once, with its largest weight, and tokens that stand around texts are no words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from quire.config.pooling import PoolingSpec
from quire.entrypoints.pooling.protocol import PoolingRequest
from quire.entrypoints.pooling.run import Pooled
from quire.errors import ValidationError
from quire.pooling_params import TOKEN_CLASSIFY


def task_of(body: PoolingRequest, spec: PoolingSpec) -> str | None:
    """What a request for anything that is pooled wants; None: what the model was made for.

    Raises:
        ValidationError: it asks for weights of words, and for what has none, or in another form.
    """
    if not body.lexical_weights:
        return body.task
    problem = None
    if not spec.weighs_words:
        problem = "is for models that weigh words, which this one does not"
    elif body.task not in (None, TOKEN_CLASSIFY):
        problem = f"is of the task {TOKEN_CLASSIFY}, and the task is {body.task}"
    elif body.encoding_format != "float":
        problem = "are JSON objects, which encoding_format base64 has not"
    if problem is not None:
        raise ValidationError(f"lexical_weights {problem}", param="lexical_weights")
    return TOKEN_CLASSIFY


def words_of(pooled: Iterable[Pooled], special_ids: frozenset[int]) -> Iterator[msgspec.Raw]:
    """Of each text an object: token id -> weight, of those above 0."""
    return (msgspec.Raw(msgspec.json.encode(one.lexical_weights(special_ids))) for one in pooled)
