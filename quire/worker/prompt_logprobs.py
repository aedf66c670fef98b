"""Logprobs of the prompt's own tokens, for requests that ask for them.

Invariant: an entry depends only on the hidden state at its position, so a prompt computed in chunks gives the
same entries as one computed whole; logits are made a slice of positions at a time, so memory does not grow
with the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.devices import Transfers, moved
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepLayout
from quire.worker.row_logits import RowLogits
from quire.worker.sampler import clear_unusable
from quire.worker.sampler.logprobs import LogprobsMode, RawLogprobs, token_logprobs


class _Slice(NamedTuple):
    """Some positions of a prompt, to be read on the host."""

    is_bad: Tensor
    """[M] bool: whose logits are not finite."""
    logprobs: RawLogprobs


class PromptEntries(NamedTuple):
    """A request's share of a step."""

    request: int
    """Its index in the step."""
    slices: list[_Slice]

    def read(self) -> list[TokenLogprobs] | None:
        """Its entries, once they are on the host; None: it has non-finite logits.

        Entry i of a chunk that starts at position c is about prompt token c + i + 1; the prompt's last position
        predicts no prompt token and has no entry.
        """
        if any(part.is_bad.any() for part in self.slices):
            return None
        return [entry for part in self.slices for entry in part.logprobs.entries()]


class PromptLogprobs:
    """The rows that want prompt logprobs, and how to compute a step's share of them.

    Args:
        logits: makes those of hidden states.
        slice_size: positions whose logits may exist at once.
        mode: whether logprobs or logits are reported; nothing is chosen here, so there is nothing to process.
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
        """Whether any row wants them."""
        return bool(self._num_logprobs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row."""
        if request.sampling_params.prompt_logprobs is not None:
            self._num_logprobs[row] = request.sampling_params.prompt_logprobs

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        self._num_logprobs.pop(row, None)

    def compute(
        self, layout: StepLayout, hidden: Tensor, adapter_rows: Tensor | None = None
    ) -> list[PromptEntries]:
        """The entries of the prompt positions of this step, on their way to the host.

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
        """For each request with something to report: index, row, its rows of `hidden`, the tokens they predict."""
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
        """Rows from `first` on whose logits may exist at once, and the tokens that they predict."""
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
