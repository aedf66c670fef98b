"""The choice of one token per row: the first of the order for greedy rows, a random one for the others.

Invariant: a random row's token is a function of its own logits and of (seed, output index). Inverse transform
sampling over the filtered distribution, in token-id order: with c the cumulative probabilities in float64 and
u in [0, 1) from the counter-based generator, the token is the first whose c exceeds u * c[-1]. Dropped tokens
add nothing to c and can so never be first. u is a multiple of 2**-52, hence u * c[-1] < c[-1] also after
rounding, and some token always is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.feature import Feature
from quire.worker.sampler.philox import uniform


class StagedDraw(NamedTuple):
    users: Tensor
    """[U] rows of the step that choose at random."""
    uniforms: Tensor
    """[U] float64 in [0, 1)."""


class Draw(Feature[StagedDraw]):
    """Random choice, and greedy choice for the rows that do not use it."""

    def __init__(self, batch: InputBatch) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._seeds = np.zeros(batch.max_num_seqs, dtype=np.int64)

    def wants(self, params: SamplingParams) -> bool:
        return not params.greedy

    def _store(self, row: int, request: NewRequestData) -> None:
        seed = request.sampling_params.seed
        assert seed is not None, "the front end gives every random request a seed"
        self._seeds[row] = seed

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> StagedDraw:
        used_rows = rows[users]
        uniforms = uniform(self._seeds[used_rows], self._batch.num_output_tokens(used_rows))
        return StagedDraw(torch.from_numpy(users), torch.from_numpy(uniforms))

    def choose(self, logits: Tensor, staged: StagedDraw | None) -> Tensor:
        """Logits [N, V] -> token ids [N] int64."""
        if staged is None:
            return _first(logits)
        if len(staged.users) == len(logits):
            return _random(logits, staged.uniforms)
        token_ids = _first(logits)
        token_ids[staged.users] = _random(logits.index_select(0, staged.users), staged.uniforms)
        return token_ids


def _first(logits: Tensor) -> Tensor:
    # numpy's argmax is vectorized and torch's is not: a tenth of the time. Both take the lowest index of
    # equals.
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def _random(logits: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = logits.softmax(1, dtype=torch.float64).cumsum_(1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Only a row without any token left (all NaN) gets past the end; the sampler reports it.
    return chosen.clamp_(max=logits.shape[1] - 1)
