"""Features that forbid or favour given token ids: `allowed_token_ids`, `min_tokens`, `logit_bias`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature, flat_indices


class StagedIds(NamedTuple):
    """Some token ids of some samples."""

    users: Tensor
    """[U] of the step's samples."""
    flat: Tensor
    """[M] indices into the flattened logits."""


class AllowedTokenIds(LogitsFeature[StagedIds]):
    """Every token that is not allowed gets probability 0."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._vocab_size = vocab_size
        self._ids: dict[int, NDArray[np.int64]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        self._ids[row] = np.unique(np.array(request.sampling_params.allowed_token_ids, dtype=np.int64))

    def _forget(self, row: int) -> None:
        del self._ids[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds:
        ids = [self._ids[row] for row in samples.rows[users].tolist()]
        return StagedIds(torch.from_numpy(users), flat_indices(users, ids, self._vocab_size))

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        kept = logits.view(-1)[staged.flat]
        logits.index_fill_(0, staged.users, -torch.inf)
        logits.view(-1)[staged.flat] = kept


class MinTokens(LogitsFeature[StagedIds]):
    """No end-of-sequence or stop token before `min_tokens` tokens; `ignore_eos` does not lift this."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._ids: dict[int, NDArray[np.int64]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def _store(self, row: int, request: NewRequestData) -> None:
        stops = {*request.eos_token_ids, *request.sampling_params.stop_token_ids}
        # A stop id outside the vocabulary is harmless: it can never be generated.
        known = sorted(token_id for token_id in stops if 0 <= token_id < self._vocab_size)
        self._ids[row] = np.array(known, dtype=np.int64)
        self._min_tokens[row] = request.sampling_params.min_tokens

    def _forget(self, row: int) -> None:
        del self._ids[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds | None:
        is_short = self._batch.output_indices(samples)[users] < self._min_tokens[samples.rows[users]]
        short = users[is_short]
        if not len(short):
            return None
        ids = [self._ids[row] for row in samples.rows[short].tolist()]
        return StagedIds(torch.from_numpy(short), flat_indices(short, ids, self._vocab_size))

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        logits.view(-1)[staged.flat] = -torch.inf


class StagedBias(NamedTuple):
    flat: Tensor
    """[M] indices into the flattened logits."""
    values: Tensor
    """[M] float32."""


class LogitBias(LogitsFeature[StagedBias]):
    """A number added to the logits of given tokens."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._vocab_size = vocab_size
        self._ids: dict[int, NDArray[np.int64]] = {}
        self._values: dict[int, NDArray[np.float32]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def _store(self, row: int, request: NewRequestData) -> None:
        bias = request.sampling_params.logit_bias or {}
        self._ids[row] = np.array(list(bias.keys()), dtype=np.int64)
        self._values[row] = np.array(list(bias.values()), dtype=np.float32)

    def _forget(self, row: int) -> None:
        del self._ids[row], self._values[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedBias:
        used_rows = samples.rows[users].tolist()
        flat = flat_indices(users, [self._ids[row] for row in used_rows], self._vocab_size)
        return StagedBias(flat, torch.from_numpy(np.concatenate([self._values[row] for row in used_rows])))

    def apply(self, logits: Tensor, staged: StagedBias) -> None:
        logits.view(-1)[staged.flat] += staged.values
