"""Logprobs of the model's own distribution: log-softmax of the logits as the model gave them
("raw_logprobs").

Invariant: nothing that shapes sampling (penalties, masks, temperature, filters) changes a reported number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Feature

WHOLE_VOCABULARY = -1


class StagedLogprobs(NamedTuple):
    rows: NDArray[np.int64]
    """[U] of the step's samples."""
    indices: Tensor
    """The same, for the device."""
    num_logprobs: list[int]
    """[U] most likely tokens wanted."""


class RawLogprobs(NamedTuple):
    """Logprobs as `ops.token_logprobs` makes them, for M rows."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    counts: list[int]
    """[M] most likely tokens wanted, at most the vocabulary."""

    def entries(self) -> list[TokenLogprobs]:
        """One per row: the chosen token first, then the most likely in order.

        The chosen token comes a second time if it is among them.
        """
        parts = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        return [
            TokenLogprobs(ids[: count + 1], logprobs[: count + 1], rank)
            for count, ids, logprobs, rank in zip(self.counts, *parts, strict=True)
        ]


class Logprobs(Feature[StagedLogprobs]):
    """The rows that want logprobs of what they sample."""

    def __init__(self, batch: InputBatch) -> None:
        super().__init__(batch.max_num_seqs)
        self._num_logprobs = np.zeros(batch.max_num_seqs, dtype=np.int64)

    def wants(self, params: SamplingParams) -> bool:
        return params.logprobs is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        num_logprobs = request.sampling_params.logprobs
        assert num_logprobs is not None
        self._num_logprobs[row] = num_logprobs

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedLogprobs:
        num_logprobs = self._num_logprobs[samples.rows[users]].tolist()
        return StagedLogprobs(users, torch.from_numpy(users), num_logprobs)


def token_logprobs(logits: Tensor, chosen: Tensor, num_logprobs: list[int]) -> RawLogprobs:
    """Logprobs of the chosen token and of the most likely ones, for each of M rows.

    Args:
        logits: [M, V] float32, finite.
        chosen: [M] token ids.
        num_logprobs: [M] most likely tokens wanted; -1 is the whole vocabulary.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if n == WHOLE_VOCABULARY else min(n, vocab_size) for n in num_logprobs]
    return RawLogprobs(*ops.token_logprobs(logits, chosen, max(counts)), counts)
