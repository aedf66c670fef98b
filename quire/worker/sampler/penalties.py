"""Repetition, frequency and presence penalties.

Invariant: a row's distinct tokens and their counts are kept up to date, so a step costs the number of
distinct tokens of the penalised rows and never the vocabulary. The arrays over the vocabulary are zero pages
until a row uses them.

Repetition: N. Keskar et al., "CTRL" (2019), section 4.1, over prompt and output. Frequency and presence:
OpenAI's definition, over the output alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.feature import LogitsFeature


class StagedPenalties(NamedTuple):
    """One entry for each distinct token of each penalised row."""

    flat: Tensor
    """[M] index into the flattened logits."""
    repetition: Tensor
    """[M] float64 factor."""
    subtracted: Tensor
    """[M] float64: frequency penalty times count, plus presence penalty if it was generated."""


class Penalties(LogitsFeature[StagedPenalties]):
    """Makes tokens that were seen less (or more) likely."""

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        rows = batch.max_num_seqs
        self._batch = batch
        self._vocab_size = vocab_size
        self._factors = np.zeros((rows, 3))  # repetition, frequency, presence
        self._distinct = np.zeros((rows, min(vocab_size, batch.max_model_len + 1)), dtype=np.int32)
        self._num_distinct = np.zeros(rows, dtype=np.int64)
        self._is_known = np.zeros((rows, vocab_size), dtype=np.bool_)
        self._output_counts = np.zeros((rows, vocab_size), dtype=np.int32)
        self._num_counted = np.zeros(rows, dtype=np.int64)

    def wants(self, params: SamplingParams) -> bool:
        return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._factors[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        tokens = np.array(request.token_ids, dtype=np.int32)
        distinct = np.unique(tokens)
        self._distinct[row, : len(distinct)] = distinct
        self._num_distinct[row] = len(distinct)
        self._is_known[row, distinct] = True
        output, counts = np.unique(tokens[request.num_prompt_tokens :], return_counts=True)
        self._output_counts[row, output] = counts
        self._num_counted[row] = len(tokens)

    def _forget(self, row: int) -> None:
        distinct = self._distinct[row, : self._num_distinct[row]]
        self._is_known[row, distinct] = False
        self._output_counts[row, distinct] = 0

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> StagedPenalties:
        used_rows = rows[users]
        self._count_new_tokens(used_rows)
        sizes = self._num_distinct[used_rows]
        entry_rows = used_rows.repeat(sizes)
        entry_index = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
        tokens = self._distinct[entry_rows, entry_index].astype(np.int64)
        counts = self._output_counts[entry_rows, tokens]
        repetition, frequency, presence = self._factors[entry_rows].T
        return StagedPenalties(
            flat=torch.from_numpy(users.repeat(sizes) * self._vocab_size + tokens),
            repetition=torch.from_numpy(repetition.copy()),
            subtracted=torch.from_numpy(frequency * counts + presence * (counts > 0)),
        )

    def _count_new_tokens(self, rows: NDArray[np.int64]) -> None:
        """Take in what was generated since the last step that staged these rows: one token each, as a rule."""
        while len(rows := rows[self._num_counted[rows] < self._batch.num_tokens[rows]]):
            tokens = self._batch.token_ids[rows, self._num_counted[rows]]
            self._num_counted[rows] += 1
            self._output_counts[rows, tokens] += 1
            is_new = ~self._is_known[rows, tokens]
            new_rows, new_tokens = rows[is_new], tokens[is_new]
            self._is_known[new_rows, new_tokens] = True
            self._distinct[new_rows, self._num_distinct[new_rows]] = new_tokens
            self._num_distinct[new_rows] += 1

    def apply(self, logits: Tensor, staged: StagedPenalties) -> None:
        ops.apply_penalties(logits, staged.flat, staged.repetition, staged.subtracted)
