# SPDX-License-Identifier: Apache-2.0
"""Sampling of a step: hidden states -> logits -> tokens.

- `RowLogits`: logits of rows, whose width depends on the row's own adapter only
- `SamplersByWidth`: one sampler per width of logits
- `RowSampling`: samples by logits; `stage_pipeline` has the counterpart that receives tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.scheduler.output import NewRequestData
from quire.worker.first_tokens import FirstTokens
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import LanguageModel
from quire.worker.sampler import Sampled, Sampler, SamplerOutput
from quire.worker.transfers import Transfers

if TYPE_CHECKING:
    from quire.worker.sample_graphs import SampleGraphs

_NONE: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


class RowLogits:
    """Logits of rows, of the model's tokens and of those added by each row's adapter.

    Invariant: the width of a row's logits depends on its own adapter, whatever its neighbors; the order of a sum over
    a row, and so its bits, depends on the width.

    Args:
        vocab_size: V, tokens of the model.
        max_added: A, most tokens that an adapter may add.

    Attributes:
        first: finds the top tokens of a vocabulary sharded over ranks; None: all logits must be computed.
    """

    def __init__(
        self, model: LanguageModel, batch: InputBatch, vocab_size: int, max_added: int, transfers: Transfers
    ) -> None:
        self._model = model
        self._batch = batch
        self._vocab_size = vocab_size
        self._max_added = max_added
        self._transfers = transfers
        self.first = FirstTokens.from_model(model)

    def widths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [N] the number of logits of each row [N]: V or V + A."""
        return self._vocab_size + self._max_added * (self._num_added(rows) > 0)

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens that a row may sample."""
        return self._vocab_size + int(self._num_added(np.array([row]))[0])

    def of(self, hidden: Tensor, adapter_rows: Tensor | None, rows: NDArray[np.int64]) -> Tensor:
        """Map hidden [N, H], and the adapter of each [N], to float32 logits, for rows [N] of one width.

        Without adapters the model gets hidden states alone, because some models accept nothing else.

        Raises:
            EngineError: the model returned another number of logits, an internal bug.
        """
        added = self._max_added if self._num_added(rows[:1]).any() else 0
        logits = self._computed(hidden, adapter_rows, added)
        if added:
            self._mask_foreign_tokens(logits, rows)
        return logits

    def of_model(self, hidden: Tensor, adapter_rows: Tensor | None) -> Tensor:
        """Compute the logits of rows without added tokens; see `of`."""
        return self._computed(hidden, adapter_rows, 0)

    def are_of_model(self, rows: NDArray[np.int64]) -> bool:
        """Return whether none of the rows [N] has added tokens."""
        return not self._widths_vary or not self._num_added(rows).any()

    def _computed(self, hidden: Tensor, adapter_rows: Tensor | None, added: int) -> Tensor:
        adapted = () if adapter_rows is None else (adapter_rows, added)
        logits = self._model.compute_logits(hidden, *adapted).contiguous()
        if logits.shape[1] != self._vocab_size + added:
            raise EngineError(
                f"the model returned {logits.shape[1]} logits for {self._vocab_size + added} tokens"
            )
        return logits

    def runs(self, rows: NDArray[np.int64], most: int) -> Iterator[slice]:
        """Yield slices of adjacent rows [N] that have one width, at most `most` rows each."""
        changes = (np.diff(self.widths(rows)).nonzero()[0] + 1).tolist() if self._widths_vary else []
        for start, end in pairwise([0, *changes, len(rows)]):
            yield from (slice(i, min(i + most, end)) for i in range(start, end, most))

    @property
    def _widths_vary(self) -> bool:
        """True if rows may have added tokens."""
        return self._batch.adapters is not None and self._batch.adapters.add_tokens

    def _num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        adapters = self._batch.adapters
        return _NONE if adapters is None else adapters.num_added(rows)

    def _mask_foreign_tokens(self, logits: Tensor, rows: NDArray[np.int64]) -> None:
        """Set added tokens that are not of the row's own adapter to -inf."""
        ends = self._transfers.upload(torch.from_numpy(self._vocab_size + self._num_added(rows)))
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(ids >= ends[:, None], -torch.inf)


class SamplersByWidth:
    """Samplers by width of logits, made when the first row of a width is added; a row's width never changes.

    Args:
        make: makes the sampler for a width of logits.

    Attributes:
        plain: sampler of rows without added tokens.
    """

    def __init__(self, make: Callable[[int], Sampler], logits: RowLogits, vocab_size: int) -> None:
        self._make = make
        self._logits = logits
        self.plain = make(vocab_size)
        self._of_width = {vocab_size: self.plain}
        self._of_row: dict[int, Sampler] = {}

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Add a request that was given a row."""
        width = int(self._logits.widths(np.array([row]))[0])
        if width not in self._of_width:
            self._of_width[width] = self._make(width)
        self._of_row[row] = self._of_width[width]
        self._of_row[row].add_request(row, request)

    def remove_request(self, row: int) -> None:
        self._of_row.pop(row).remove_request(row)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """See `Sampler.reads_tokens`."""
        return any(sampler.reads_tokens(rows) for sampler in self._of_width.values())

    @property
    def replay(self) -> bool:
        """See `Sampler.replays`."""
        return any(sampler.replays for sampler in self._of_width.values())

    def of_row(self, row: int) -> Sampler:
        """Return the sampler of a row."""
        return self._of_row[row]

    def of(self, rows: NDArray[np.int64]) -> Sampler:
        """Return the sampler of at least one row, all of one width."""
        return self._of_width[int(self._logits.widths(rows[:1])[0])]


class SampledPart(Protocol):
    """Part of the samples of a step."""

    @property
    def codes(self) -> Tensor:
        """Token ids or failure codes; see `Sampled`."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> SampledPart:
        """Return a copy with its tensors moved, as by `Transfers.download`."""

    def read(self) -> SamplerOutput:
        """Return the output; the tensors must have arrived on the host."""


class Sampling(Protocol):
    """Source of the sampled tokens of a step."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""

    def remove_request(self, row: int) -> None:
        """Drop the state of a row."""

    def set_num_logprobs(self, row: int, num_logprobs: int) -> None:
        """Report another number of most likely tokens of a row from now on."""

    def reads_tokens(self, inputs: StepInputs) -> bool:
        """Return whether `sample` needs earlier sampled tokens on the host."""

    @property
    def replays(self) -> bool:
        """True if `sample` may read hidden states of tokens that are not sampled anew."""

    def sample(self, inputs: StepInputs, hidden: Tensor) -> Sequence[SampledPart]:
        """Return all samples of a step, in order."""


class RowSampling:
    """Sampling by logits of the rows.

    Args:
        slice_size: most rows of logits that exist at once.
        graphs: captured sampling, used where a graph fits.
    """

    def __init__(
        self,
        logits: RowLogits,
        samplers: SamplersByWidth,
        slice_size: int,
        transfers: Transfers,
        graphs: SampleGraphs | None = None,
    ) -> None:
        self._logits = logits
        self._samplers = samplers
        self._slice_size = slice_size
        self._transfers = transfers
        self._graphs = graphs

    def add_request(self, row: int, request: NewRequestData) -> None:
        self._samplers.add_request(row, request)

    def remove_request(self, row: int) -> None:
        self._samplers.remove_request(row)

    def set_num_logprobs(self, row: int, num_logprobs: int) -> None:
        self._samplers.of_row(row).set_num_logprobs(row, num_logprobs)

    def reads_tokens(self, inputs: StepInputs) -> bool:
        return self._samplers.reads_tokens(inputs.layout.samples.rows)

    @property
    def replays(self) -> bool:
        return self._samplers.replay

    def sample(self, inputs: StepInputs, hidden: Tensor) -> Sequence[Sampled]:
        if self.replays:
            self._replay(inputs, hidden)
        samples = inputs.layout.samples
        runs = [*self._logits.runs(samples.rows, self._slice_size)]
        # With several parts, the next one would overwrite the hidden states that a graph reads.
        graphs = self._graphs if len(runs) == 1 and self._logits.are_of_model(samples.rows) else None
        return [self._sample_part(inputs, hidden, samples.part(part), part, graphs) for part in runs]

    def _replay(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Sample again what preempted requests had sampled before, as far as this step computes it."""
        layout, adapter_rows = inputs.layout, inputs.step.adapter_rows
        for index, row in enumerate(layout.rows.tolist()):
            sampler, start = self._samplers.of_row(row), int(layout.starts[index])
            columns = sampler.columns_to_replay(row, start, int(layout.ends[index]))
            offset = (
                int(layout.query_start_loc[index]) - start - 1
            )  # plus the column: index of its hidden state
            for first in columns[:: self._slice_size]:
                end = min(first + self._slice_size, columns.stop)
                part = slice(offset + first, offset + end)
                adapters = None if adapter_rows is None else adapter_rows[part]
                logits = self._logits.of(hidden[part], adapters, np.full(end - first, row))
                for place, column in enumerate(range(first, end)):
                    sampler.replay(logits[place : place + 1], row, column)

    def _sample_part(
        self, inputs: StepInputs, hidden: Tensor, samples: Samples, part: slice, graphs: SampleGraphs | None
    ) -> Sampled:
        adapter_rows = inputs.step.adapter_rows
        adapters = None if adapter_rows is None else _of_samples(inputs, adapter_rows, part)
        of_samples, sampler = _of_samples(inputs, hidden, part), self._samplers.of(samples.rows)
        staged = sampler.stage_on_host(samples)
        first = self._logits.first if adapters is None else None
        if first is not None and staged.is_plain_greedy:
            return Sampled.of_codes(first.codes(of_samples))
        sampled = None if graphs is None else graphs.sample(staged, of_samples, adapters)
        if sampled is not None:
            return sampled
        num = None if first is None else staged.num_deciding()
        if first is not None and num is not None and first.are_few(num):
            logits = first.logits(of_samples, num)
        else:
            logits = self._logits.of(of_samples, adapters, samples.rows)
        return sampler.sample(logits, staged.moved(self._transfers.upload))


def _of_samples(inputs: StepInputs, of_tokens: Tensor, part: slice) -> Tensor:
    """Return of a per-token tensor the rows of some samples."""
    layout = inputs.layout
    if layout.is_all_sampled:  # no gather needed
        return of_tokens[: layout.num_tokens][part]
    return of_tokens.index_select(0, inputs.logits_indices[part])
