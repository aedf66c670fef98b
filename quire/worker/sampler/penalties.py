# SPDX-License-Identifier: Apache-2.0
"""Repetition, frequency and presence penalties.

Where the device has the tokens, it counts them in every step (`ops.penalize_rows`), so the host need not read samples.
Persistent counts would have to be undone after rejected drafts and save little: counting a token takes two atomic
operations on 4 bytes, while attention reads 131,072 bytes of an 8B model's cache for it. Clearing a table for 256 rows
of 152,000 tokens is 156 MB, 50 us at 3 TB/s in a step of 12 ms; a persistent table would be read whole, which is as
much.

Where the host has them, each row's distinct tokens and counts are kept, so a step costs the number of distinct tokens
of penalized rows, never the vocabulary.

Repetition: N. Keskar et al., "CTRL" (2019), section 4.1, over prompt and output. Frequency and presence: OpenAI's
definition, over the output alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature, Staged

WHOLE_CONTEXT = -1


class Penalties(LogitsFeature[Staged]):
    """Penalties of tokens that have occurred."""

    def __init__(self, batch: InputBatch) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._factors = np.zeros((batch.max_num_seqs, 3))  # repetition, frequency, presence

    def wants(self, params: SamplingParams) -> bool:
        return _factors(params) != (1.0, 0.0, 0.0) and params.repeat_last_n == WHOLE_CONTEXT

    def _store(self, row: int, request: NewRequestData) -> None:
        self._factors[row] = _factors(request.sampling_params)


def _factors(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


class StagedPlaces(NamedTuple):
    """Arguments of `ops.penalize_rows` besides the logits and the tokens."""

    places: Tensor
    factors: Tensor
    longest: int


class DevicePenalties(Penalties[StagedPlaces]):
    """Penalties counted by the device in its own rows."""

    def __init__(self, batch: InputBatch, tokens: Tensor) -> None:
        super().__init__(batch)
        self._tokens = tokens

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedPlaces:
        rows, columns = samples.rows[users], samples.columns[users]
        places = np.stack((users, rows, self._batch.num_prompt_tokens[rows], columns), axis=1)
        return StagedPlaces(
            torch.from_numpy(places), torch.from_numpy(self._factors[rows]), int(columns.max())
        )

    def apply(self, logits: Tensor, staged: StagedPlaces) -> None:
        ops.penalize_rows(logits, self._tokens, *staged)


class StagedPenalties(NamedTuple):
    """One entry per distinct token before each penalized sample."""

    flat: Tensor
    """[M] index into the flattened logits."""
    repetition: Tensor
    """[M] float64 factor."""
    subtracted: Tensor
    """[M] float64: frequency penalty times count, plus presence penalty if generated."""


class _Counted(NamedTuple):
    """One token in each of some rows, and whether it is the row's first occurrence."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int32]
    is_new: NDArray[np.bool_]


class HostPenalties(Penalties[StagedPenalties]):
    """Penalties counted by the host, token by token.

    Drafts are counted for the samples after them, and undone. Arrays over the vocabulary are zero pages until used.
    """

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch)
        rows = batch.max_num_seqs
        self._vocab_size = vocab_size
        self._distinct = np.zeros((rows, min(vocab_size, batch.max_model_len + 1)), dtype=np.int32)
        self._num_distinct = np.zeros(rows, dtype=np.int64)
        self._is_known = np.zeros((rows, vocab_size), dtype=np.bool_)
        self._output_counts = np.zeros((rows, vocab_size), dtype=np.int32)
        self._num_counted = np.zeros(rows, dtype=np.int64)

    def _store(self, row: int, request: NewRequestData) -> None:
        super()._store(row, request)
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

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedPenalties:
        rows = samples.rows[users]
        self._count_known_tokens(rows)
        num_drafts = samples.columns[users] - self._batch.num_tokens[rows]  # before each sample
        parts = [self._entries(rows[num_drafts == 0], users[num_drafts == 0])]
        counted = []
        for depth in range(1, int(num_drafts.max()) + 1):
            drafted = np.unique(rows[num_drafts >= depth])
            counted.append(self._count(drafted, self._batch.num_tokens[drafted] + depth - 1))
            parts.append(self._entries(rows[num_drafts == depth], users[num_drafts == depth]))
        while counted:
            self._take_back(counted.pop())
        return StagedPenalties(*map(torch.cat, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]

    def _entries(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> StagedPenalties:
        """Return the entries of samples `users`, whose rows count exactly the tokens before them."""
        sizes = self._num_distinct[rows]
        entry_rows = rows.repeat(sizes)
        entry_index = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
        tokens = self._distinct[entry_rows, entry_index].astype(np.int64)
        counts = self._output_counts[entry_rows, tokens]
        repetition, frequency, presence = self._factors[entry_rows].T
        return StagedPenalties(
            flat=torch.from_numpy(users.repeat(sizes) * self._vocab_size + tokens),
            repetition=torch.from_numpy(repetition.copy()),
            subtracted=torch.from_numpy(frequency * counts + presence * (counts > 0)),
        )

    def _count_known_tokens(self, rows: NDArray[np.int64]) -> None:
        """Count what was generated since these rows were last staged: usually one token each."""
        while len(rows := rows[self._num_counted[rows] < self._batch.num_tokens[rows]]):
            self._count(rows, self._num_counted[rows])
            self._num_counted[rows] += 1

    def _count(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> _Counted:
        """Count a token of each row. A row given several times, with the same column, counts once."""
        tokens = self._batch.token_ids[rows, columns]
        self._output_counts[rows, tokens] += 1
        is_new = ~self._is_known[rows, tokens]
        new_rows, new_tokens = rows[is_new], tokens[is_new]
        self._is_known[new_rows, new_tokens] = True
        self._distinct[new_rows, self._num_distinct[new_rows]] = new_tokens
        self._num_distinct[new_rows] += 1
        return _Counted(rows, tokens, is_new)

    def _take_back(self, counted: _Counted) -> None:
        """Undo the last `_count`."""
        rows, tokens, was_new = counted
        self._output_counts[rows, tokens] -= 1
        self._is_known[rows[was_new], tokens[was_new]] = False
        self._num_distinct[rows[was_new]] -= 1

    def apply(self, logits: Tensor, staged: StagedPenalties) -> None:
        ops.apply_penalties(logits, staged.flat, staged.repetition, staged.subtracted)


class WindowedPenalties(LogitsFeature[StagedPenalties]):
    """Penalties over the last `repeat_last_n` tokens only.

    Counted from scratch for each sample, on the host, at the cost of the window's size.
    """

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}

    def wants(self, params: SamplingParams) -> bool:
        return _factors(params) != (1.0, 0.0, 0.0) and params.repeat_last_n > 0

    def _store(self, row: int, request: NewRequestData) -> None:
        self._params[row] = request.sampling_params

    def _forget(self, row: int) -> None:
        del self._params[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedPenalties:
        parts = [self._entries(user, int(samples.rows[user]), int(samples.columns[user])) for user in users]
        return StagedPenalties(*map(torch.cat, zip(*parts, strict=True)))

    def _entries(self, user: int, row: int, column: int) -> StagedPenalties:
        """Return one entry per distinct token of the window before a sample."""
        params, tokens = self._params[row], self._batch.token_ids[row]
        start = max(0, column - params.repeat_last_n)
        first_output = min(max(start, int(self._batch.num_prompt_tokens[row])), column)
        distinct = np.unique(tokens[start:column]).astype(np.int64)
        output, counts = np.unique(tokens[first_output:column], return_counts=True)
        generated = np.zeros(len(distinct))
        generated[np.searchsorted(distinct, output)] = counts
        repetition, frequency, presence = _factors(params)
        return StagedPenalties(
            flat=torch.from_numpy(user * self._vocab_size + distinct),
            repetition=torch.full((len(distinct),), repetition, dtype=torch.float64),
            subtracted=torch.from_numpy(frequency * generated + presence * (generated > 0)),
        )

    def apply(self, logits: Tensor, staged: StagedPenalties) -> None:
        ops.apply_penalties(logits, staged.flat, staged.repetition, staged.subtracted)


def make_penalties(batch: InputBatch, vocab_size: int) -> Penalties[Any]:
    """Return penalties counted where the tokens are first known."""
    if batch.device_tokens is None:
        return HostPenalties(batch, vocab_size)
    return DevicePenalties(batch, batch.device_tokens)
