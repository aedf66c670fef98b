"""Weights of words in replies: an object for each text.

BGE-M3 weighs the tokens of a text (Chen et al., 2024, arXiv:2402.03216), of which those that stand around it are no
words; SPLADE all tokens that there are. Invariant: a word counts once, with its largest weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from quire.config.pooling import PoolingSpec
from quire.entrypoints.pooling.protocol import PoolingRequest
from quire.entrypoints.pooling.run import Pooled
from quire.errors import ValidationError


def task_of(body: PoolingRequest, spec: PoolingSpec) -> str | None:
    """What a request for anything that is pooled wants; None: what the model was made for.

    Raises:
        ValidationError: it asks for weights of words, and for what has none, or in another form.
    """
    if not body.lexical_weights:
        return body.task
    problem = None
    task = spec.task_of_words
    if task is None:
        problem = "is for models that weigh words, which this one does not"
    elif body.task not in (None, task):
        problem = f"is of the task {task}, and the task is {body.task}"
    elif body.average_windows:
        problem = "are of whole texts, and average_windows of windows"
    elif body.encoding_format != "float":
        problem = "are JSON objects, which encoding_format base64 has not"
    if problem is not None:
        raise ValidationError(f"lexical_weights {problem}", param="lexical_weights")
    return task


def words_of(pooled: Iterable[Pooled], special_ids: frozenset[int]) -> Iterator[msgspec.Raw]:
    """Of each text an object: token id -> weight, of those above 0; of a text's own tokens without the special ones."""
    return (msgspec.Raw(msgspec.json.encode(one.lexical_weights(special_ids))) for one in pooled)
