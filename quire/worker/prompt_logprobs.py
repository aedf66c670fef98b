"""Logprobs of the prompt's own tokens, for requests that ask for them.

Invariant: an entry depends only on the hidden state at its position, so a prompt computed in chunks gives the
same entries as one computed whole; logits are made a slice of positions at a time, so memory does not grow
with the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs
from quire.worker.sampler import non_finite_rows
from quire.worker.sampler.logprobs import token_logprobs


class PromptLogprobs:
    """The rows that want prompt logprobs, and how to compute a step's share of them.

    Args:
        compute_logits: hidden [N, H] -> logits [N, V] float32.
        slice_size: positions whose logits may exist at once.
    """

    def __init__(
        self, batch: InputBatch, compute_logits: Callable[[Tensor], Tensor], slice_size: int
    ) -> None:
        self._batch = batch
        self._compute_logits = compute_logits
        self._slice_size = slice_size
        self._num_logprobs: dict[int, int] = {}

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row."""
        if request.sampling_params.prompt_logprobs is not None:
            self._num_logprobs[row] = request.sampling_params.prompt_logprobs

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        self._num_logprobs.pop(row, None)

    def compute(self, inputs: StepInputs, hidden: Tensor) -> tuple[dict[int, list[TokenLogprobs]], set[int]]:
        """Entries of the prompt positions of this step, and which requests have non-finite logits there.

        Both are keyed by the request's index in `inputs.rows`. Entry i of a chunk that starts at position c
        is about prompt token c + i + 1; the prompt's last position predicts no prompt token and has no entry.
        """
        entries: dict[int, list[TokenLogprobs]] = {}
        failed: set[int] = set()
        for index, hidden_rows, targets in self._chunks(inputs) if self._num_logprobs else ():
            num_logprobs = self._num_logprobs[int(inputs.rows[index])]
            found = self._entries(hidden[hidden_rows], targets, num_logprobs)
            if found is None:
                failed.add(index)
            else:
                entries[index] = found
        return entries, failed

    def _chunks(self, inputs: StepInputs) -> Iterator[tuple[int, slice, NDArray[np.int64]]]:
        """For each request with something to report: its index, its rows of `hidden`, and the tokens they predict."""
        for index, row in enumerate(inputs.rows.tolist()):
            if row not in self._num_logprobs:
                continue
            first, offset = int(inputs.starts[index]), int(inputs.query_start_loc[index])
            length = int(inputs.query_start_loc[index + 1]) - offset
            length = min(length, int(self._batch.num_prompt_tokens[row]) - 1 - first)
            if length > 0:
                targets = self._batch.token_ids[row, first + 1 : first + 1 + length].astype(np.int64)
                yield index, slice(offset, offset + length), targets

    def _entries(
        self, hidden: Tensor, targets: NDArray[np.int64], num_logprobs: int
    ) -> list[TokenLogprobs] | None:
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), self._slice_size):
            part = slice(start, start + self._slice_size)
            logits = self._compute_logits(hidden[part])
            if non_finite_rows(logits):
                return None
            chosen = torch.from_numpy(targets[part]).to(logits.device)
            entries += token_logprobs(logits, chosen, [num_logprobs] * len(logits))
        return entries
