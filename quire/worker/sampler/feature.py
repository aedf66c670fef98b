# SPDX-License-Identifier: Apache-2.0
"""Base classes of sampling features.

Invariant: a feature owns the settings of the rows that use it. `stage` (host: numpy, indices) is apart from `apply`
(device: torch, logits), so that staging can run during the forward pass. Between them passes a named tuple whose
tensors are moved to the device, never state. An unused feature costs one comparison per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import Samples

Staged = TypeVar("Staged")
Failures = dict[int, str]  # sample that cannot continue -> reason


class Feature(ABC, Generic[Staged]):
    """Part of sampling that some requests use.

    Args:
        max_num_seqs: rows of the batch.
    """

    reads_tokens: ClassVar[bool] = False
    """True if `stage` reads sampled tokens, which must have reached the host then."""

    def __init__(self, max_num_seqs: int) -> None:
        self._is_user = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_users = 0

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the settings of a request that uses the feature."""
        if self.wants(request.sampling_params):
            self._is_user[row] = True
            self._num_users += 1
            self._store(row, request)

    def remove_request(self, row: int) -> None:
        """Drop the row; no-op if it did not use the feature."""
        if self._is_user[row]:
            self._is_user[row] = False
            self._num_users -= 1
            self._forget(row)

    def has_users(self, rows: NDArray[np.int64]) -> bool:
        """Return whether one of these rows uses the feature."""
        return self._num_users > 0 and bool(self._is_user[rows].any())

    def stage(self, samples: Samples) -> Staged | None:
        """Return what `apply` needs for N samples, or None if none of their rows uses the feature."""
        if not self._num_users:
            return None
        users = np.flatnonzero(self._is_user[samples.rows])
        return self._stage(samples, users) if len(users) else None

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters uses the feature."""

    @abstractmethod
    def _store(self, row: int, request: NewRequestData) -> None:
        """Store a user's settings."""

    def _forget(self, row: int) -> None:
        """Drop settings that cost memory or would be wrong for the row's next owner."""
        return None

    @abstractmethod
    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> Staged | None:
        """Stage for the non-empty indices `users` into `samples`."""


class LogitsFeature(Feature[Staged]):
    """Feature that changes logits."""

    limits_drafts: ClassVar[bool] = False
    """True if `num_allowed` and `forced_tokens` are worth calling."""

    def num_allowed(self, row: int, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Return how many leading drafts after a row's known tokens could be sampled."""
        return len(drafts)

    def forced_tokens(self, row: int, known: NDArray[np.int32]) -> list[int]:
        """Return tokens that the feature forces after a row's known tokens; perhaps not all."""
        return []

    @abstractmethod
    def apply(self, logits: Tensor, staged: Staged) -> Failures | None:
        """Change logits [N, V] float32, contiguous, in place; each sample's result depends on that sample alone.

        Return the failed samples; some token must remain possible in their logits.
        """


def flat_indices(users: NDArray[np.int64], ids: Sequence[NDArray[np.int64]], vocab_size: int) -> Tensor:
    """Return indices into flattened logits of the token ids `ids[i]` of sample `users[i]`."""
    lengths = [len(some) for some in ids]
    return torch.from_numpy((users * vocab_size).repeat(lengths) + np.concatenate(ids))
