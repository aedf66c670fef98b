# SPDX-License-Identifier: Apache-2.0
"""Outputs of pooling requests: embeddings, classes, scores, and raw pooled values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput, RequestError

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestError",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a text."""

    embedding: list[float]

    @classmethod
    def from_base(cls, base: PoolingOutput) -> Self:
        return cls(_vector(base, "an embedding"))

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """One number per class, by default its probability."""

    probs: list[float]

    @classmethod
    def from_base(cls, base: PoolingOutput) -> Self:
        return cls(_vector(base, "a classification"))

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Score of how well two texts match: higher is better."""

    score: float


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Embedding of one prompt."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(*base.with_outputs(EmbeddingOutput.from_base(base.outputs)))


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Classification of one prompt."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(*base.with_outputs(ClassificationOutput.from_base(base.outputs)))


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Score of one pair; its tokens are those of both texts."""


def _vector(base: PoolingOutput, what: str) -> list[float]:
    if base.data.ndim != 1:
        raise ValueError(f"{what} is a vector, but the output has the shape {base.data.shape}")
    numbers: list[float] = base.data.tolist()
    return numbers
