"""Logprobs of the model's own distribution: log-softmax of the logits as the model gave them
("raw_logprobs").

Invariant: nothing that shapes sampling (penalties, masks, temperature, filters) changes a reported number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.feature import Feature
from quire.worker.sampler.order import ids_of, order_keys, rank_of

WHOLE_VOCABULARY = -1


class Logprobs(Feature[NDArray[np.int64]]):
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

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> NDArray[np.int64]:
        """[U] rows of the step."""
        return users

    def num_logprobs(self, rows: NDArray[np.int64]) -> list[int]:
        """How many of the most likely tokens these rows want."""
        counts: list[int] = self._num_logprobs[rows].tolist()
        return counts


def token_logprobs(logits: Tensor, chosen: Tensor, num_logprobs: list[int]) -> list[TokenLogprobs]:
    """Logprobs of the chosen token and of the most likely ones, for each of M rows.

    Args:
        logits: [M, V] float32, finite.
        chosen: [M] token ids.
        num_logprobs: [M] most likely tokens wanted; -1 is the whole vocabulary.

    Returns:
        One entry per row: the chosen token first, then the most likely in order. The chosen token comes a
        second time if it is among them.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if n == WHOLE_VOCABULARY else min(n, vocab_size) for n in num_logprobs]
    logprobs = logits.log_softmax(1)
    keys = order_keys(logits)
    best = ids_of(keys.topk(max(counts)).values, vocab_size)
    chosen_logprobs = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
    columns = (best.tolist(), logprobs.gather(1, best).tolist(), chosen.tolist(), chosen_logprobs)
    ranks = rank_of(keys, chosen).tolist()
    return [
        TokenLogprobs([token, *ids[:n]], [logprob, *values[:n]], rank)
        for n, ids, values, token, logprob, rank in zip(counts, *columns, ranks, strict=True)
    ]
