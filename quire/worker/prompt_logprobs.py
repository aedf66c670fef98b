# SPDX-License-Identifier: Apache-2.0
"""Logprobs of the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepLayout
from quire.worker.sampler import clear_unusable
from quire.worker.sampler.logprobs import LogprobsMode, RawLogprobs, token_logprobs
from quire.worker.sampling import RowLogits
from quire.worker.transfers import Transfers, moved


class _Slice(NamedTuple):
    """Logprobs of some prompt positions, on their way to the host."""

    is_bad: Tensor
    """[M] bool: non-finite logits."""
    logprobs: RawLogprobs


class PromptEntries(NamedTuple):
    """Prompt logprobs of one request in one step."""

    request: int
    """Index of the request in the step."""
    slices: list[_Slice]

    def read(self) -> list[TokenLogprobs] | None:
        """Return the entries, once they are on the host; None: some logits are non-finite.

        Entry i of a chunk that starts at position c is about prompt token c + i + 1. The prompt's last position
        predicts no prompt token and has no entry.
        """
        if any(part.is_bad.any() for part in self.slices):
            return None
        return [entry for part in self.slices for entry in part.logprobs.entries()]


class PromptLogprobs:
    """Logprobs of prompt tokens, for the rows that request them.

    Invariant: an entry depends only on the hidden state at its position, so a chunked prompt gives the same entries.
    Logits are made a slice of positions at a time, so memory does not grow with the prompt.

    Args:
        logits: makes logits of hidden states.
        slice_size: most positions whose logits exist at once.
        mode: logprobs or logits; nothing is sampled here, so raw and processed are the same.
    """

    def __init__(
        self,
        batch: InputBatch,
        logits: RowLogits,
        slice_size: int,
        transfers: Transfers,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._mode = mode
        self._batch = batch
        self._logits = logits
        self._slice_size = slice_size
        self._transfers = transfers
        self._num_logprobs: dict[int, int] = {}

    @property
    def are_wanted(self) -> bool:
        """True if any row requests prompt logprobs."""
        return bool(self._num_logprobs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the request's setting."""
        if request.sampling_params.prompt_logprobs is not None:
            self._num_logprobs[row] = request.sampling_params.prompt_logprobs

    def remove_request(self, row: int) -> None:
        self._num_logprobs.pop(row, None)

    def compute(
        self, layout: StepLayout, hidden: Tensor, adapter_rows: Tensor | None = None
    ) -> list[PromptEntries]:
        """Start the download of the entries for this step's prompt positions.

        adapter_rows [T]: see `StepContext`.
        """
        if not self._num_logprobs:
            return []
        return [
            PromptEntries(
                index,
                [
                    self._slice(
                        self._logits_of(hidden, adapter_rows, part, row), some, self._num_logprobs[row]
                    )
                    for part, some in self._parts(hidden_rows.start, targets)
                ],
            )
            for index, row, hidden_rows, targets in self._chunks(layout)
        ]

    def _chunks(self, layout: StepLayout) -> Iterator[tuple[int, int, slice, NDArray[np.int64]]]:
        """Yield index, row, slice of `hidden` and target tokens for each request with prompt logprobs in this step."""
        for index, row in enumerate(layout.rows.tolist()):
            if row not in self._num_logprobs:
                continue
            first, offset = int(layout.starts[index]), int(layout.query_start_loc[index])
            length = int(layout.query_start_loc[index + 1]) - offset
            length = min(length, int(self._batch.num_prompt_tokens[row]) - 1 - first)
            if length > 0:
                targets = self._batch.token_ids[row, first + 1 : first + 1 + length].astype(np.int64)
                yield index, row, slice(offset, offset + length), targets

    def _parts(self, first: int, targets: NDArray[np.int64]) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of hidden states, from `first` on, whose logits may exist at once, with their target tokens."""
        for start in range(0, len(targets), self._slice_size):
            some = targets[start : start + self._slice_size]
            yield slice(first + start, first + start + len(some)), torch.from_numpy(some)

    def _logits_of(self, hidden: Tensor, adapter_rows: Tensor | None, part: slice, row: int) -> Tensor:
        adapters = None if adapter_rows is None else adapter_rows[part]
        return self._logits.of(hidden[part], adapters, np.full(part.stop - part.start, row))

    def _slice(self, logits: Tensor, targets: Tensor, num_logprobs: int) -> _Slice:
        download = self._transfers.download
        is_bad = clear_unusable(logits)
        targets, counts = self._transfers.upload(targets), [num_logprobs] * len(logits)
        logprobs = token_logprobs(logits, targets, counts, self._mode)
        return _Slice(download(is_bad), moved(logprobs, download))
