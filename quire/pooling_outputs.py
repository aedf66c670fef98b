# SPDX-License-Identifier: Apache-2.0
"""Output of a pooling request as the engine returns it: plain data, which `quire.pooling.outputs` specializes."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import FOREIGN_WORDS, DeadlineError, EngineError, QuireError
from quire.outputs import RequestStateStats
from quire.plugins import import_place

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """Pooled output; `data` is float32 [size], or [tokens, size] for token-wise tasks; read-only."""

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True, frozen=True)
class RequestError:
    """Failure of a pooling request: HTTP status, message, and whether a retry may help."""

    code: int
    message: str
    retryable: bool


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """Pooled output of one prompt, complete and final.

    `finish_reason` is "stop", or the reason why `outputs` is empty: "abort", "timeout" or "error", with details in
    `stop_reason`.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt: str | None = None
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    metrics: RequestStateStats = field(default_factory=RequestStateStats)

    def check(self) -> None:
        """Raise the error of a prompt that was not pooled.

        Raises:
            DeadlineError: it timed out.
            EngineError: it failed or was aborted.
        """
        failure = self._failure()
        if failure is not None:
            raise failure

    @property
    def error(self) -> RequestError | None:
        """Failure in vLLM's form; None: there was none."""
        failure = self._failure()
        if failure is None:
            return None
        return RequestError(failure.status, str(failure), self.finish_reason != "error")

    def lexical_weights(self, without: Collection[int] = ()) -> dict[int, float]:
        """Return token id -> largest weight above 0, for a model with token weights.

        Applies to `token_classify` of a model that weighs a text's tokens (BGE-M3), or `embed` of one that weighs the
        vocabulary (SPLADE).

        Args:
            without: token ids of the text that are no words, such as special ones.

        Raises:
            ValueError: the output is not one weight per token.
        """
        data = self.outputs.data if isinstance(self.outputs, PoolingOutput) else np.zeros(0)
        if data.ndim == 1:
            return {token_id: float(data[token_id]) for token_id in np.flatnonzero(data > 0).tolist()}
        if data.shape != (len(self.prompt_token_ids), 1):
            raise ValueError(f"expected one weight per token, but the output has the shape {data.shape}")
        largest: dict[int, float] = {}
        for token_id, weight in zip(self.prompt_token_ids, data[:, 0].tolist(), strict=True):
            if token_id not in without and weight > max(0.0, largest.get(token_id, 0.0)):
                largest[token_id] = weight
        return largest

    def _failure(self) -> QuireError | None:
        if self.finish_reason == "timeout":
            return DeadlineError("the request's time was over before its prompt was pooled")
        if self.finish_reason == "stop":
            return None
        how = "failed" if self.finish_reason == "error" else "was aborted"
        reason = self.stop_reason if isinstance(self.stop_reason, str) else ""
        why = f": {reason.partition(FOREIGN_WORDS)[0]}" if reason else ""
        return EngineError(f"the request {how} in the engine before it was complete{why}")

    def with_outputs(self, outputs: Any) -> tuple[Any, ...]:
        """Return this output's fields with other `outputs`."""
        return (
            self.request_id,
            outputs,
            self.prompt_token_ids,
            self.num_cached_tokens,
            self.finished,
            self.prompt,
            self.finish_reason,
            self.stop_reason,
            self.metrics,
        )


_FORMER = (
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
)
"""Classes that are in `quire.pooling.outputs` now, importable from here for one release."""


def __getattr__(name: str) -> Any:
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is in quire.pooling.outputs now", DeprecationWarning, stacklevel=2)
    return import_place(f"quire.pooling.outputs:{name}")
