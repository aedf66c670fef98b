# SPDX-License-Identifier: Apache-2.0
"""Scores of text pairs, by cross-encoder or by similarity of embeddings; and windows of long texts.

Invariant: a pair's score depends on its two texts alone. A text that fits the context has one window, whose embedding
equals the one without windows. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.pooling import PoolingSpec
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt
from quire.entrypoints.chat.messages import TextEncoder
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ValidationError
from quire.pooling.inputs import DOCUMENT, QUERY, Compose, PoolingInputs
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_EMBED, PoolingParams, TextOptions

Pooled = PoolingRequestOutput[PoolingOutput]

T = TypeVar("T")
Vector = NDArray[np.float64]


class TextWindows:
    """The inputs of one request, split into windows.

    Args:
        check_count: called with the number of windows so far; raises ValidationError if there are too many.

    Raises:
        ValidationError: the options truncate texts, which contradicts windows.
    """

    def __init__(
        self,
        inputs: PoolingInputs,
        options: TextOptions,
        check_count: Callable[[int], None] = lambda _count: None,
    ) -> None:
        if options.truncate_prompt_tokens is not None:
            raise ValidationError(
                "average_windows and truncation cannot be combined: windows keep the whole text",
                param="average_windows",
            )
        self._inputs, self._options, self._check_count = inputs, options, check_count
        self._num_each: list[int] = []

    def prompts(self, inputs: Sequence[str | list[int]]) -> list[TokenizedPrompt]:
        """Return the windows of all inputs, in input order.

        Raises:
            ValidationError: an input is empty, or there are too many windows.
        """
        prompts: list[TokenizedPrompt] = []
        for one in inputs:
            windows = self._windows_of(one)
            self._num_each.append(len(windows))
            prompts += windows
            self._check_count(len(prompts))
        return prompts

    def _windows_of(self, one: str | list[int]) -> list[TokenizedPrompt]:
        if isinstance(one, str):
            return self._inputs.windows(one, self._options)
        if len(one) > self._inputs.config.model.max_model_len:
            raise ValidationError(
                "average_windows needs texts; an input of token ids exceeds the context",
                param="average_windows",
            )
        return [self._inputs.tokenize(PromptParts(token_ids=one), self._options)]

    def joined(self, pooled: Sequence[Pooled], *, normalized: bool) -> list[NDArray[np.float32]]:
        """Return an embedding for each input: the mean of its windows weighted by tokens, normalized if theirs are."""
        return [_mean(windows, normalized=normalized) for windows in self.of_each(pooled)]

    def of_each(self, pooled: Sequence[Pooled]) -> list[Sequence[Pooled]]:
        """Group the pooled windows by input."""
        starts = np.cumsum([0, *self._num_each])
        return [pooled[start : start + count] for start, count in zip(starts, self._num_each, strict=False)]


def is_normalized(spec: PoolingSpec, use_activation: bool | None) -> bool:
    """Return whether embeddings are normalized to length 1."""
    return spec.activation == "normalize" and use_activation is not False


def _mean(windows: Sequence[Pooled], *, normalized: bool) -> NDArray[np.float32]:
    if len(windows) == 1:
        return windows[0].outputs.data
    weights = [len(one.prompt_token_ids) for one in windows]
    mean = np.average([one.outputs.data.astype(np.float64) for one in windows], axis=0, weights=weights)
    length = float(np.linalg.norm(mean)) if normalized else 1.0
    return (mean / (length or 1.0)).astype(np.float32)


def _cosine(one: Vector, other: Vector) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def _best_matches(query: Vector, document: Vector) -> Vector:
    """Return each query token's best match in the document (late interaction; ColBERT, 2020)."""
    return (query @ document.T).max(axis=1) if len(document) else np.zeros(len(query))


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": _cosine,
    "dot": lambda one, other: float(one @ other),
    "euclidean": lambda one, other: -float(np.linalg.norm(one - other)),
    "manhattan": lambda one, other: -float(np.abs(one - other).sum()),
}  # Similarities of two embeddings [size]; greater is more similar.
TOKEN_SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "maxsim": lambda query, document: float(_best_matches(query, document).sum()),
    "meanmaxsim": lambda query, document: float(_best_matches(query, document).mean()),
}  # Similarities of two texts' token embeddings [tokens, size].


def scoring_task(spec: PoolingSpec) -> str | None:
    """Return the task by which a model scores pairs; None: it cannot."""
    if spec.is_cross_encoder:
        return CLASSIFY
    return next((task for task in (EMBED, TOKEN_EMBED) if task in spec.tasks), None)


def template_composer(template: ChatTemplate, tokenizer: TextEncoder, options: dict[str, Any]) -> Compose:
    """Return a composer of pairs by a chat template with these options."""

    def compose(query: str, document: str, instruction: str) -> list[int]:
        return template.compose_pair(query, document, instruction, options).encode(tokenizer)

    return compose


class Scoring:
    """The pairs of one request: prompts to pool, and scores.

    Args:
        firsts: one text for all of `seconds`, or one for each.
        options: tokenization options; embeddings also get the model's prompts for queries and documents.
        compose: returns the token ids of a pair, instead of the tokenizer's pair template; needed for language models
            that score by their output.

    Raises:
        ValidationError: the model does not score, the numbers of texts do not match, or `compose` is given for a model
            that embeds texts separately.
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
                f"this model is served for {', '.join(inputs.spec.tasks)} and cannot score pairs",
                param="model",
            )
        if not firsts or len(firsts) not in (1, len(seconds)):
            raise ValidationError(
                f"there are {len(firsts)} first and {len(seconds)} second texts; there must be one first text, or as "
                "many as second ones"
            )
        if compose is not None and task != CLASSIFY:
            raise ValidationError(
                "chat_template needs a cross-encoder, and this model compares embeddings",
                param="chat_template",
            )
        self._inputs, self._options, self._task, self._compose = inputs, options, task, compose
        self._firsts, self._seconds = firsts, seconds
        self._skipped = inputs.ids_of(inputs.spec.skipped_words)

    @property
    def task(self) -> str:
        """Task of each prompt."""
        return self._task

    def params(self, use_activation: bool | None = None) -> PoolingParams:
        """Return the pooling parameters of each prompt."""
        return PoolingParams(task=self._task, use_activation=use_activation)

    @property
    def reads_pairs(self) -> bool:
        """True if each pair is one prompt."""
        return self._task == CLASSIFY

    def prompts(self) -> list[TokenizedPrompt]:
        """Return one prompt per pair, or all first texts followed by all second ones.

        Raises:
            ValidationError: a text is empty or too long.
        """
        if self.reads_pairs:
            pairs = self._pairs(self._firsts, self._seconds)
            if self._compose is None:
                return [*self._inputs.pairs(pairs, self._options)]
            return [*self._inputs.composed(pairs, self._options, self._compose)]
        asked, own = self._options.max_tokens_per_text, self._inputs.spec.side_lengths
        sides = ((QUERY, self._firsts, asked[0] or own[0]), (DOCUMENT, self._seconds, asked[1] or own[1]))
        return [self._text(text, names, limit) for names, texts, limit in sides for text in texts]

    def outputs(self, pooled: Sequence[Pooled]) -> list[tuple[float, list[Pooled]]]:
        """Return the score of each pair with its outputs, from the outputs of all prompts."""
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
        """Return the embeddings of the document's tokens that are not skipped."""
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
