# SPDX-License-Identifier: Apache-2.0
"""Logprobs of samples: of the sampled token, and of the most likely or of requested tokens.

Invariant: in the raw modes nothing that shapes sampling (penalties, masks, temperature, filters) changes a reported
number; in the processed modes all of it does. Ranks are of the same numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops, reference_sampling
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Feature

WHOLE_VOCABULARY = -1
_SLICE_ELEMENTS = 1 << 22  # most logits copied at once for requested tokens


class LogprobsMode(enum.Enum):
    """Values of `--logprobs-mode`: the model's numbers (raw) or those sampled from (processed)."""

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_processed(self) -> bool:
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def is_logits(self) -> bool:
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


class RawLogprobs(NamedTuple):
    """Logprobs of `ops.token_logprobs` for M rows, and for L requested tokens."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    counts: list[int]
    """[M] most likely tokens reported, at most the vocabulary."""
    listed: Sequence[Sequence[int]] = ()
    """[M] tokens reported in place of the most likely; empty: no row has any."""
    listed_logprobs: Tensor | None = None
    """[sum of the lengths of `listed`]."""
    listed_ranks: Tensor | None = None

    def entries(self) -> list[TokenLogprobs]:
        """Return one entry per row: the sampled token, then the most likely in order or the requested in their order.

        The sampled token is repeated if it is among them.
        """
        parts = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        entries = [
            TokenLogprobs(ids[: count + 1], logprobs[: count + 1], rank)
            for count, ids, logprobs, rank in zip(self.counts, *parts, strict=True)
        ]
        if self.listed_logprobs is None or self.listed_ranks is None:
            return entries
        logprobs, ranks, end = self.listed_logprobs.tolist(), self.listed_ranks.tolist(), 0
        for index, ids in enumerate(self.listed):
            start, end = end, end + len(ids)
            if ids:
                chosen = entries[index]
                entries[index] = TokenLogprobs(
                    [chosen.token_ids[0], *ids],
                    [chosen.logprobs[0], *logprobs[start:end]],
                    chosen.rank,
                    ranks[start:end],
                )
        return entries


class StagedLogprobs(NamedTuple):
    rows: NDArray[np.int64]
    """[U] of the step's samples."""
    indices: Tensor
    """[U] `rows`, for the device."""
    num_logprobs: list[int]
    """[U] most likely tokens reported."""
    listed: Sequence[Sequence[int]]
    """[U] tokens reported in their place; empty: no row has any."""
    listed_rows: Tensor | None
    """[L] index into `rows` of each requested token."""
    listed_ids: Tensor | None

    def read(self, logits: Tensor, chosen: Tensor, mode: LogprobsMode) -> RawLogprobs:
        """Return the logprobs from logits [U, V] of these samples, with sampled tokens `chosen` [U]."""
        found = token_logprobs(logits, chosen, self.num_logprobs, mode)
        if self.listed_rows is None or self.listed_ids is None:
            return found
        logprobs, ranks = _listed(logits, self.listed_rows, self.listed_ids, mode)
        return found._replace(listed=self.listed, listed_logprobs=logprobs, listed_ranks=ranks)


class Logprobs(Feature[StagedLogprobs]):
    """Logprobs settings of the rows that request them."""

    def __init__(self, batch: InputBatch) -> None:
        super().__init__(batch.max_num_seqs)
        self._num_logprobs = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._listed: dict[int, Sequence[int]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.wants_logprobs

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if params.logprob_token_ids is not None:
            self._listed[row] = params.logprob_token_ids
            self._num_logprobs[row] = 0
        else:
            assert params.logprobs is not None
            self._num_logprobs[row] = params.logprobs

    def set_num(self, row: int, num_logprobs: int) -> None:
        """Report another number of most likely tokens of a user's row from now on."""
        assert self._is_user[row], "the row reports no logprobs"
        self._num_logprobs[row] = num_logprobs

    def _forget(self, row: int) -> None:
        self._listed.pop(row, None)

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedLogprobs:
        rows = samples.rows[users]
        listed: list[Sequence[int]] = []
        listed_rows = listed_ids = None
        if self._listed:
            listed = [self._listed.get(row, ()) for row in rows.tolist()]
            lengths = [len(ids) for ids in listed]
            listed_rows = torch.from_numpy(np.arange(len(rows)).repeat(lengths))
            listed_ids = torch.tensor([token for ids in listed for token in ids], dtype=torch.int64)
        num_logprobs = self._num_logprobs[rows].tolist()
        return StagedLogprobs(users, torch.from_numpy(users), num_logprobs, listed, listed_rows, listed_ids)


def token_logprobs(
    logits: Tensor, chosen: Tensor, num_logprobs: list[int], mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
) -> RawLogprobs:
    """Return logprobs of the sampled token and of the most likely ones, for each of M rows.

    Args:
        logits: [M, V] float32, without a NaN or +inf.
        chosen: [M] token ids.
        num_logprobs: [M] most likely tokens wanted; -1 is the whole vocabulary.
        mode: logprobs or logits.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if n == WHOLE_VOCABULARY else min(n, vocab_size) for n in num_logprobs]
    # Processed logits have many -inf, and the kernels do not order impossible tokens.
    make = reference_sampling.token_logprobs if mode.is_processed else ops.token_logprobs
    token_ids, logprobs, ranks = make(logits, chosen, max(counts))
    if mode.is_logits:
        logprobs = logits.gather(1, token_ids)
    return RawLogprobs(token_ids, logprobs, ranks, counts)


def _listed(logits: Tensor, rows: Tensor, ids: Tensor, mode: LogprobsMode) -> tuple[Tensor, Tensor]:
    """Return logprobs and ranks [E] of tokens `ids` [E], each in one of the rows of logits [U, V]."""
    size = max(1, _SLICE_ELEMENTS // logits.shape[1])
    parts = [
        token_logprobs(logits[rows[start : start + size]], some, [0] * len(some), mode)
        for start, some in ((start, ids[start : start + size]) for start in range(0, len(ids), size))
    ]
    if not parts:
        return logits.new_zeros(0), ids
    return torch.cat([part.logprobs[:, 0] for part in parts]), torch.cat([part.ranks for part in parts])
