"""Logprobs of what was sampled: of the chosen token, and of the most likely tokens or of those that were asked for.

Invariant: in the raw modes nothing that shapes sampling (penalties, masks, temperature, filters) changes a reported
number; in the processed ones all of it does. A rank is the place in the order of the same numbers.
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
_SLICE_ELEMENTS = 1 << 22
"""Logits that are copied at once for tokens that were asked for."""


class LogprobsMode(enum.Enum):
    """`--logprobs-mode`: which numbers are reported, those of the model or those that the choice was made from."""

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
    """Logprobs as `ops.token_logprobs` makes them, for M rows, and for tokens that L of them list."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    counts: list[int]
    """[M] most likely tokens wanted, at most the vocabulary."""
    listed: Sequence[Sequence[int]] = ()
    """[M] tokens that are wanted in place of the most likely; empty: no row has any."""
    listed_logprobs: Tensor | None = None
    """[sum of the lengths of `listed`]."""
    listed_ranks: Tensor | None = None

    def entries(self) -> list[TokenLogprobs]:
        """One per row: the chosen token first, then the most likely in order, or the listed ones as listed.

        The chosen token comes a second time if it is among them.
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
    """The same, for the device."""
    num_logprobs: list[int]
    """[U] most likely tokens wanted."""
    listed: Sequence[Sequence[int]]
    """[U] tokens wanted in their place; empty: by none."""
    listed_rows: Tensor | None
    """For each listed token its place in `rows`."""
    listed_ids: Tensor | None

    def of(self, logits: Tensor, chosen: Tensor, mode: LogprobsMode) -> RawLogprobs:
        """What is wanted of logits [U, V] of these samples, of which `chosen` [U] were chosen."""
        found = token_logprobs(logits, chosen, self.num_logprobs, mode)
        if self.listed_rows is None or self.listed_ids is None:
            return found
        logprobs, ranks = _listed(logits, self.listed_rows, self.listed_ids, mode)
        return found._replace(listed=self.listed, listed_logprobs=logprobs, listed_ranks=ranks)


class Logprobs(Feature[StagedLogprobs]):
    """The rows that want logprobs of what they sample."""

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
    logits: Tensor,
    chosen: Tensor,
    num_logprobs: list[int],
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> RawLogprobs:
    """Logprobs of the chosen token and of the most likely ones, for each of M rows.

    Args:
        logits: [M, V] float32, without a NaN or +inf.
        chosen: [M] token ids.
        num_logprobs: [M] most likely tokens wanted; -1 is the whole vocabulary.
        mode: whether logprobs or logits are wanted.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if n == WHOLE_VOCABULARY else min(n, vocab_size) for n in num_logprobs]
    # Of logits that were processed many are -inf, and the kernels do not tell one impossible token from another.
    make = reference_sampling.token_logprobs if mode.is_processed else ops.token_logprobs
    token_ids, logprobs, ranks = make(logits, chosen, max(counts))
    if mode.is_logits:
        logprobs = logits.gather(1, token_ids)
    return RawLogprobs(token_ids, logprobs, ranks, counts)


def _listed(logits: Tensor, rows: Tensor, ids: Tensor, mode: LogprobsMode) -> tuple[Tensor, Tensor]:
    """Logprobs and ranks [E] of tokens `ids` [E], each in one of the rows of logits [U, V]."""
    size = max(1, _SLICE_ELEMENTS // logits.shape[1])
    parts = [
        token_logprobs(logits[rows[start : start + size]], some, [0] * len(some), mode)
        for start, some in ((start, ids[start : start + size]) for start in range(0, len(ids), size))
    ]
    if not parts:
        return logits.new_zeros(0), ids
    return torch.cat([part.logprobs[:, 0] for part in parts]), torch.cat([part.ranks for part in parts])
