"""How well two texts go together: by a model that reads both as one, or by the similarity of their embeddings.

Invariant: a pair's score depends on its two texts alone. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.pooling import PoolingSpec
from quire.engine.pooling_inputs import DOCUMENT, QUERY, PoolingInputs, TextOptions
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt
from quire.errors import ValidationError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_EMBED, PoolingParams

T = TypeVar("T")
Vector = NDArray[np.float64]


def _cosine(one: Vector, other: Vector) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def _max_sim(query: Vector, document: Vector) -> float:
    """Late interaction: for each token of the query its best match in the document. Source: ColBERT (2020)."""
    return float((query @ document.T).max(axis=1).sum())


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": _cosine,
    "dot": lambda one, other: float(one @ other),
    "euclidean": lambda one, other: -float(np.linalg.norm(one - other)),
    "manhattan": lambda one, other: -float(np.abs(one - other).sum()),
}
"""Of two embeddings [size]; greater is more alike."""


def scoring_task(spec: PoolingSpec) -> str | None:
    """By which of its tasks a model scores pairs; None: it cannot."""
    if spec.is_cross_encoder:
        return CLASSIFY
    return next((task for task in (EMBED, TOKEN_EMBED) if task in spec.tasks), None)


class Scoring:
    """The pairs of one request: which prompts are to be pooled for them, and what their scores are.

    Args:
        firsts: one text for all of `seconds`, or one for each.
        options: of the texts; those of embeddings get the model's prompts for queries and documents.
        compose: makes token ids of a pair, in place of what the model's tokenizer puts around and between two texts.

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
        compose: Callable[[str, str], list[int]] | None = None,
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
            return [self._composed(self._compose(*pair), pair[0]) for pair in pairs]
        most = self._options.max_tokens_per_text
        sides = ((QUERY, self._firsts, most[0]), (DOCUMENT, self._seconds, most[1]))
        return [self._text(text, names, limit) for names, texts, limit in sides for text in texts]

    def outputs(
        self, pooled: Sequence[PoolingRequestOutput[PoolingOutput]]
    ) -> list[tuple[float, list[PoolingRequestOutput[PoolingOutput]]]]:
        """The score of each pair, with what it is made of, from the outputs of all prompts."""
        if self.reads_pairs:
            return [(float(one.outputs.data[0]), [one]) for one in pooled]
        firsts, seconds = pooled[: len(self._firsts)], pooled[len(self._firsts) :]
        compare = _max_sim if self._task == TOKEN_EMBED else SIMILARITIES[self._inputs.spec.similarity]
        pairs = self._pairs(firsts, seconds)
        return [(compare(_numbers(first), _numbers(second)), [first, second]) for first, second in pairs]

    def _pairs(self, firsts: Sequence[T], seconds: Sequence[T]) -> list[tuple[T, T]]:
        each = list(firsts) * (len(seconds) if len(firsts) == 1 else 1)
        return list(zip(each, seconds, strict=True))

    def _composed(self, token_ids: list[int], text: str) -> TokenizedPrompt:
        return self._inputs.tokenize(PromptParts(text, token_ids), self._options)

    def _text(self, text: str, names: tuple[str, ...], limit: int | None) -> TokenizedPrompt:
        options = self._options
        if options.prompt_name is None:
            options = replace(options, prompt_name=self._inputs.prompt_named(names))
        if limit is not None:
            options = replace(options, truncate_prompt_tokens=limit)
        return self._inputs.tokenize(PromptParts(text), options)


def _numbers(output: PoolingRequestOutput[PoolingOutput]) -> Vector:
    return output.outputs.data.astype(np.float64)
