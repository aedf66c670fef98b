# SPDX-License-Identifier: Apache-2.0
"""Pooling over tokens, in any number of chunks; and float32 heads applied to pooled vectors.

Shapes: T tokens of the step, R requests reduced, H hidden size, S rows of the batch, N vectors.

Invariant: a text's vector depends on its own tokens and their order only. Sums go token by token from where the last
chunk stopped, in float64, so bits do not depend on chunks or neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config.pooling import HeadLayer
from quire.kernels import ops
from quire.kernels.experts import SUM_DTYPE, TokenReduction
from quire.layers.base import Module
from quire.layers.head import HeadLinear
from quire.layers.step import StepContext

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "excess": lambda x: x[:, 1:] - x[:, :1],
}


class PoolingHead(Module):
    """Sequence of head layers; identity without any."""

    is_replicated = True

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HeadLinear(layer) for layer in layers)
        self._names = [layer.name for layer in layers]
        self._activations = [ACTIVATIONS[layer.activation] for layer in layers]

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """Map float32 [N, inputs] to [N, outputs]; the step has only the adapters of these rows."""
        for layer, activation in zip(self.layers, self._activations, strict=True):
            x = activation(layer(x, step))
        return x

    def checkpoint_layers(self) -> Iterator[tuple[list[str], HeadLinear]]:
        """Yield names and layers, as a model does."""
        for name, layer in zip(self._names, self.layers, strict=True):
            assert isinstance(layer, HeadLinear)
            yield [name], layer


@dataclass(frozen=True)
class TextChunks:
    """Chunks of texts in a step, [R] each."""

    rows: NDArray[np.int64]
    """Distinct rows of the batch."""
    firsts: NDArray[np.int64]
    """Flat index of the chunk's first token."""
    starts: NDArray[np.int64]
    """Position of that token in its text."""
    counts: NDArray[np.int64]
    """Tokens of the chunk, at least one."""
    is_last: NDArray[np.bool_]
    """True if the text ends with the chunk."""


class Reduction(Protocol):
    """One kind of pooling, with its state of unfinished texts."""

    def reduce(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        """Add a step's hidden states [T, H]; return float32 [R', H] vectors of the texts that end."""


class LastToken:
    """Hidden state of the last token; stateless."""

    def __init__(self, num_rows: int) -> None:
        """Accept the number of rows of the other reductions."""

    def reduce(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        last = (chunks.firsts + chunks.counts - 1)[chunks.is_last]
        return hidden.index_select(0, _index(last, hidden)).float()


class _VectorPerRow:
    """Base with a vector per row, allocated with the first text."""

    dtype = torch.float32

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._vectors: Tensor | None = None

    def _kept(self, hidden: Tensor) -> Tensor:
        """Return the vectors [S, H]."""
        if self._vectors is None:
            shape = (self._num_rows, hidden.shape[1])
            self._vectors = torch.zeros(shape, dtype=self.dtype, device=hidden.device)
        return self._vectors

    def _ended(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        return self._kept(hidden).index_select(0, _index(chunks.rows[chunks.is_last], hidden))


class FirstToken(_VectorPerRow):
    """Hidden state of the first token."""

    def reduce(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        begins = chunks.starts == 0
        first = hidden.index_select(0, _index(chunks.firsts[begins], hidden))
        self._kept(hidden)[_index(chunks.rows[begins], hidden)] = first.float()
        return self._ended(hidden, chunks)


class Accumulation(_VectorPerRow):
    """Reduction token by token."""

    reduction: TokenReduction

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.dtype = SUM_DTYPE[self.reduction]

    def reduce(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        places = np.stack((chunks.rows, chunks.firsts, chunks.starts, chunks.counts))
        ops.accumulate(self._kept(hidden), hidden, _index(places, hidden), self.reduction)
        return self._finished(self._ended(hidden, chunks), (chunks.starts + chunks.counts)[chunks.is_last])

    def _finished(self, vectors: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """Return the vectors [R', H] of finished texts with so many tokens [R']."""
        return vectors


class MaxPooling(Accumulation):
    """Maximum of each number."""

    reduction = "max"


class Mean(Accumulation):
    """Sum divided by the number of tokens."""

    reduction: TokenReduction = "sum"

    def _finished(self, vectors: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        divisors = torch.from_numpy(self._divisors(lengths.astype(np.float64))).to(vectors.device)
        return (vectors / divisors[:, None]).float()

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return lengths


class MeanSqrtLength(Mean):
    """Sum divided by the root of the number of tokens."""

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sqrt(lengths)


class WeightedMean(Mean):
    """Mean in which the n-th token has weight n (Muennighoff, 2022, arXiv:2202.08904)."""

    reduction = "weighted"

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return lengths * (lengths + 1) / 2


REDUCTIONS: dict[str, Callable[[int], Reduction]] = {
    "last": LastToken,
    "cls": FirstToken,
    "max": MaxPooling,
    "mean": Mean,
    "mean_sqrt_len": MeanSqrtLength,
    "weighted_mean": WeightedMean,
}
"""Pooling -> reduction for a batch of so many rows."""


class JoinedReductions:
    """Concatenation of several poolings."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = reductions

    def reduce(self, hidden: Tensor, chunks: TextChunks) -> Tensor:
        return torch.cat([one.reduce(hidden, chunks) for one in self._reductions], dim=1)


def make_reduction(poolings: Sequence[str], num_rows: int) -> Reduction | None:
    """Return the reduction of one or several poolings; None: they keep a vector per token."""
    if not REDUCTIONS.keys() >= {*poolings}:
        return None
    reductions = [REDUCTIONS[pooling](num_rows) for pooling in poolings]
    return reductions[0] if len(reductions) == 1 else JoinedReductions(reductions)


def _index(values: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
