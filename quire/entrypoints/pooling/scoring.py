"""How well two texts go together: by a model that reads both as one, or by the similarity of their embeddings.

Invariant: a pair's score depends on its two texts alone. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.pooling import PoolingSpec
from quire.engine.pooling_inputs import DOCUMENT, QUERY, Compose, PoolingInputs, TextOptions
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt
from quire.entrypoints.chat.plain_text import Encoder
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ValidationError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_EMBED, PoolingParams

T = TypeVar("T")
Vector = NDArray[np.float64]
Pooled = PoolingRequestOutput[PoolingOutput]


def _cosine(one: Vector, other: Vector) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def _best_matches(query: Vector, document: Vector) -> Vector:
    """Late interaction: for each token of the query its best match in the document. Source: ColBERT (2020)."""
    return (query @ document.T).max(axis=1) if len(document) else np.zeros(len(query))


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": _cosine,
    "dot": lambda one, other: float(one @ other),
    "euclidean": lambda one, other: -float(np.linalg.norm(one - other)),
    "manhattan": lambda one, other: -float(np.abs(one - other).sum()),
}
"""Of two embeddings [size]; greater is more alike."""
TOKEN_SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "maxsim": lambda query, document: float(_best_matches(query, document).sum()),
    "meanmaxsim": lambda query, document: float(_best_matches(query, document).mean()),
}
"""Of the embeddings [tokens, size] of two texts."""


def scoring_task(spec: PoolingSpec) -> str | None:
    """By which of its tasks a model scores pairs; None: it cannot."""
    if spec.is_cross_encoder:
        return CLASSIFY
    return next((task for task in (EMBED, TOKEN_EMBED) if task in spec.tasks), None)


def by_template(template: ChatTemplate, tokenizer: Encoder, options: dict[str, Any]) -> Compose:
    """Pairs as a chat template writes them that is told these options."""

    def compose(query: str, document: str, instruction: str) -> list[int]:
        return template.compose_pair(query, document, instruction, options).encode(tokenizer)

    return compose


class Scoring:
    """The pairs of one request: which prompts are to be pooled for them, and what their scores are.

    Args:
        firsts: one text for all of `seconds`, or one for each.
        options: of the texts; those of embeddings get the model's prompts for queries and documents.
        compose: makes token ids of a pair, in place of what the model's tokenizer puts around and between two texts; a
            language model that scores by what it would say needs it.

    Raises:
        ValidationError: the model does not score, the numbers of texts do not fit, or pairs are composed of which it
            reads the texts apart.
    """

    def __init__(
        self,
        inputs: PoolingInputs,
        firsts: Sequence[str],
        seconds: Sequence[str],
        options: TextOptions,
        compose: Compose | None = None,
    ) -> None:
        task = scoring_task(inputs.spec)
        if task is None:
            raise ValidationError(
                f"this model is served for {', '.join(inputs.spec.tasks)} and scores no pairs", param="model"
            )
        if not firsts or len(firsts) not in (1, len(seconds)):
            raise ValidationError(
                f"there are {len(firsts)} first and {len(seconds)} second texts; there must be one first text, or as "
                "many as second ones"
            )
        if compose is not None and task != CLASSIFY:
            raise ValidationError(
                "chat_template is for models that read both texts as one, and this one compares embeddings",
                param="chat_template",
            )
        self._inputs, self._options, self._task, self._compose = inputs, options, task, compose
        self._firsts, self._seconds = firsts, seconds
        self._skipped = inputs.ids_of(inputs.spec.skipped_words)

    @property
    def task(self) -> str:
        """What is to be pooled of each prompt."""
        return self._task

    def params(self, use_activation: bool | None = None) -> PoolingParams:
        """What is to be pooled of each prompt."""
        return PoolingParams(task=self._task, use_activation=use_activation)

    @property
    def reads_pairs(self) -> bool:
        """Whether each pair is one prompt."""
        return self._task == CLASSIFY

    def prompts(self) -> list[TokenizedPrompt]:
        """One of each pair; or those of all first texts, then of all second ones.

        Raises:
            ValidationError: a text is empty or too long.
        """
        if self.reads_pairs:
            pairs = self._pairs(self._firsts, self._seconds)
            if self._compose is None:
                return [*self._inputs.pairs(pairs, self._options)]
            return [*self._inputs.composed(pairs, self._options, self._compose)]
        asked, own = self._options.max_tokens_per_text, self._inputs.spec.side_lengths
        sides = (
            (QUERY, self._firsts, asked[0] or own[0]),
            (DOCUMENT, self._seconds, asked[1] or own[1]),
        )
        return [self._text(text, names, limit) for names, texts, limit in sides for text in texts]

    def outputs(self, pooled: Sequence[Pooled]) -> list[tuple[float, list[Pooled]]]:
        """The score of each pair, with what it is made of, from the outputs of all prompts."""
        if self.reads_pairs:
            return [(float(one.outputs.data[0]), [one]) for one in pooled]
        firsts, seconds = pooled[: len(self._firsts)], pooled[len(self._firsts) :]
        return [(self._compared(*pair), [*pair]) for pair in self._pairs(firsts, seconds)]

    def _compared(self, first: Pooled, second: Pooled) -> float:
        spec = self._inputs.spec
        if self._task == EMBED:
            return SIMILARITIES[spec.similarity](_numbers(first), _numbers(second))
        compare = TOKEN_SIMILARITIES.get(spec.similarity, TOKEN_SIMILARITIES["maxsim"])
        return compare(_numbers(first), self._matched(second))

    def _matched(self, document: Pooled) -> Vector:
        """Of a document's tokens those that count."""
        is_matched = [token not in self._skipped for token in document.prompt_token_ids]
        return _numbers(document)[is_matched]

    def _pairs(self, firsts: Sequence[T], seconds: Sequence[T]) -> list[tuple[T, T]]:
        each = list(firsts) * (len(seconds) if len(firsts) == 1 else 1)
        return list(zip(each, seconds, strict=True))

    def _text(self, text: str, names: tuple[str, ...], limit: int | None) -> TokenizedPrompt:
        options = self._options
        if options.prompt_name is None:
            options = replace(options, prompt_name=self._inputs.prompt_named(names))
        if limit is not None:
            options = replace(options, truncate_prompt_tokens=limit)
        return self._inputs.tokenize(PromptParts(text), options)


def _numbers(output: Pooled) -> Vector:
    return output.outputs.data.astype(np.float64)
