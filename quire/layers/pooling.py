"""How the hidden states of a text become one vector, in any number of steps.

Shapes: T tokens of the step, R requests of it that are reduced, H hidden size, S rows of the batch.
Invariant: what a text becomes depends on its own tokens and their order alone: sums are made one token after the other,
from where the step before stopped, so no bit tells how a prompt was cut or who was beside it. Sums are float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.kernels.pooling import SUM_DTYPE, Accumulated


@dataclass(frozen=True)
class Chunks:
    """Which tokens of a step are whose: [R] each."""

    rows: NDArray[np.int64]
    """Rows of the batch, all different."""
    firsts: NDArray[np.int64]
    """Index of each one's first token in the step."""
    starts: NDArray[np.int64]
    """Position of that token in its text."""
    counts: NDArray[np.int64]
    """Tokens, at least one."""
    is_last: NDArray[np.bool_]
    """Whether the text ends with them."""


class Reduction(Protocol):
    """One way of pooling, with what it keeps of texts that have not ended."""

    def reduce(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        """Take in a step's hidden states [T, H]; returns, of the texts that end, their vectors, float32 [R', H]."""


class LastToken:
    """The last token's, of which nothing has to be kept."""

    def __init__(self, num_rows: int) -> None:
        """Whatever the number of rows."""

    def reduce(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        last = (chunks.firsts + chunks.counts - 1)[chunks.is_last]
        return hidden.index_select(0, _index(last, hidden)).float()


class _Keeping:
    """A vector for each row, made when the first text comes."""

    dtype = torch.float32

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._vectors: Tensor | None = None

    def _kept(self, hidden: Tensor) -> Tensor:
        """[S, H]."""
        if self._vectors is None:
            shape = (self._num_rows, hidden.shape[1])
            self._vectors = torch.zeros(shape, dtype=self.dtype, device=hidden.device)
        return self._vectors

    def _ended(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        return self._kept(hidden).index_select(0, _index(chunks.rows[chunks.is_last], hidden))


class FirstToken(_Keeping):
    """The first token's."""

    def reduce(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        begins = chunks.starts == 0
        first = hidden.index_select(0, _index(chunks.firsts[begins], hidden))
        self._kept(hidden)[_index(chunks.rows[begins], hidden)] = first.float()
        return self._ended(hidden, chunks)


class Accumulation(_Keeping):
    """What is made token by token, from what was made of those before."""

    reduction: Accumulated

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.dtype = SUM_DTYPE[self.reduction]

    def reduce(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        places = np.stack((chunks.rows, chunks.firsts, chunks.starts, chunks.counts))
        ops.accumulate(self._kept(hidden), hidden, _index(places, hidden), self.reduction)
        return self._finished(self._ended(hidden, chunks), (chunks.starts + chunks.counts)[chunks.is_last])

    def _finished(self, vectors: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """What becomes of what was made of whole texts, [R', H], that have so many tokens, [R']."""
        return vectors


class Greatest(Accumulation):
    """The greatest of each number."""

    reduction = "max"


class Mean(Accumulation):
    """The sum over the number of tokens."""

    reduction: Accumulated = "sum"

    def _finished(self, vectors: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        divisors = torch.from_numpy(self._divisors(lengths.astype(np.float64))).to(vectors.device)
        return (vectors / divisors[:, None]).float()

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return lengths


class MeanSqrtLength(Mean):
    """The sum over the root of the number of tokens."""

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sqrt(lengths)


class WeightedMean(Mean):
    """The mean in which the n-th token counts n times (Muennighoff, 2022, arXiv:2202.08904)."""

    reduction = "weighted"

    def _divisors(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        return lengths * (lengths + 1) / 2


REDUCTIONS: dict[str, Callable[[int], Reduction]] = {
    "last": LastToken,
    "cls": FirstToken,
    "max": Greatest,
    "mean": Mean,
    "mean_sqrt_len": MeanSqrtLength,
    "weighted_mean": WeightedMean,
}
"""Way of pooling -> what does it, given how many rows the batch has."""


class Joined:
    """Several ways; their vectors stand one behind the other."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = reductions

    def reduce(self, hidden: Tensor, chunks: Chunks) -> Tensor:
        return torch.cat([one.reduce(hidden, chunks) for one in self._reductions], dim=1)


def make_reduction(poolings: Sequence[str], num_rows: int) -> Reduction | None:
    """What makes one vector of a text, in one way or several; None: they leave each token its own."""
    if not REDUCTIONS.keys() >= {*poolings}:
        return None
    reductions = [REDUCTIONS[pooling](num_rows) for pooling in poolings]
    return reductions[0] if len(reductions) == 1 else Joined(reductions)


def _index(values: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
