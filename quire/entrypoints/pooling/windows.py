"""Texts that are longer than the model's context: their windows, and one embedding of all of them.

Invariant: a text that fits has one window, and the embedding that it has without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.config.pooling import PoolingSpec
from quire.engine.pooling_inputs import PoolingInputs, TextOptions
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt
from quire.errors import ValidationError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput

Pooled = PoolingRequestOutput[PoolingOutput]


class Windows:
    """The inputs of one request, in windows.

    Args:
        check_count: given how many there are so far; raises ValidationError if these are too many.

    Raises:
        ValidationError: the options cut texts, of which windows leave nothing to cut.
    """

    def __init__(
        self,
        inputs: PoolingInputs,
        options: TextOptions,
        check_count: Callable[[int], None] = lambda _count: None,
    ) -> None:
        if options.truncate_prompt_tokens is not None:
            raise ValidationError(
                "average_windows leaves nothing of a text to be cut off: either is possible, not both",
                param="average_windows",
            )
        self._inputs, self._options, self._check_count = inputs, options, check_count
        self._num_each: list[int] = []

    def prompts(self, inputs: Sequence[str | list[int]]) -> list[TokenizedPrompt]:
        """Those of the first input, then of the second, and so on.

        Raises:
            ValidationError: an input is empty, or they are too many windows.
        """
        prompts: list[TokenizedPrompt] = []
        for one in inputs:
            windows = self._of(one)
            self._num_each.append(len(windows))
            prompts += windows
            self._check_count(len(prompts))
        return prompts

    def _of(self, one: str | list[int]) -> list[TokenizedPrompt]:
        if isinstance(one, str):
            return self._inputs.windows(one, self._options)
        if len(one) > self._inputs.config.model.max_model_len:
            raise ValidationError(
                "average_windows is for texts, and an input is token ids", param="average_windows"
            )
        return [self._inputs.tokenize(PromptParts(token_ids=one), self._options)]

    def joined(self, pooled: Sequence[Pooled], *, normalized: bool) -> list[NDArray[np.float32]]:
        """An embedding for each input: the mean of its windows' by their tokens, of length 1 if theirs are."""
        return [_mean(windows, normalized=normalized) for windows in self.of_each(pooled)]

    def of_each(self, pooled: Sequence[Pooled]) -> list[Sequence[Pooled]]:
        """What was pooled of the windows of each input."""
        starts = np.cumsum([0, *self._num_each])
        return [pooled[start : start + count] for start, count in zip(starts, self._num_each, strict=False)]


def is_normalized(spec: PoolingSpec, use_activation: bool | None) -> bool:
    """Whether embeddings have the length 1."""
    return spec.activation == "normalize" and use_activation is not False


def _mean(windows: Sequence[Pooled], *, normalized: bool) -> NDArray[np.float32]:
    if len(windows) == 1:
        return windows[0].outputs.data
    weights = [len(one.prompt_token_ids) for one in windows]
    mean = np.average([one.outputs.data.astype(np.float64) for one in windows], axis=0, weights=weights)
    length = float(np.linalg.norm(mean)) if normalized else 1.0
    return (mean / (length or 1.0)).astype(np.float32)
