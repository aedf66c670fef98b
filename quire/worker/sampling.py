"""Where the tokens of a step come from: from logits of its rows, or (`stage_pipeline`) from another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from quire.scheduler.output import NewRequestData
from quire.worker.devices import Transfers
from quire.worker.input_batch import Samples
from quire.worker.inputs import StepInputs
from quire.worker.row_logits import RowLogits
from quire.worker.sample_graphs import SampleGraphs
from quire.worker.sampler import Sampled, SamplerOutput
from quire.worker.samplers import Samplers


class SampledPart(Protocol):
    """Some of the samples of a step."""

    @property
    def codes(self) -> Tensor:
        """As `Sampled` has them."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> SampledPart:
        """With its tensors moved, as by `Transfers.download`."""

    def read(self) -> SamplerOutput:
        """What it says, once it is on the host."""


class Sampling(Protocol):
    """Has the tokens of a step."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """A request was given a row."""

    def remove_request(self, row: int) -> None:
        """It has lost it."""

    def reads_tokens(self, inputs: StepInputs) -> bool:
        """Whether `sample` needs the tokens sampled before on the host."""

    @property
    def replays(self) -> bool:
        """Whether `sample` may read hidden states behind which nothing new is sampled."""

    def sample(self, inputs: StepInputs, hidden: Tensor) -> Sequence[SampledPart]:
        """All samples of a step with these hidden states, in order."""


class RowSampling:
    """Chooses by logits.

    Args:
        slice_size: rows of logits that exist at once.
        graphs: choose where they can.
    """

    def __init__(
        self,
        logits: RowLogits,
        samplers: Samplers,
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
        # Graphs read hidden states where those of the next part would be written over.
        graphs = self._graphs if len(runs) == 1 and self._logits.are_of_model(samples.rows) else None
        return [self._sample_part(inputs, hidden, samples.part(part), part, graphs) for part in runs]

    def _replay(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Sample again what requests had sampled before they lost their rows, as far as this step computes it."""
        layout, adapter_rows = inputs.layout, inputs.step.adapter_rows
        for index, row in enumerate(layout.rows.tolist()):
            sampler, start = self._samplers.of_row(row), int(layout.starts[index])
            columns = sampler.columns_to_replay(row, start, int(layout.ends[index]))
            before_first = (
                int(layout.query_start_loc[index]) - start - 1
            )  # less the column: where its state lies
            for first in columns[:: self._slice_size]:
                end = min(first + self._slice_size, columns.stop)
                part = slice(before_first + first, before_first + end)
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
        if first is not None and staged.take_the_first:
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
    """Of what has a row for each token, the rows behind which some of the samples are taken."""
    layout = inputs.layout
    if layout.is_all_sampled:  # then nothing has to be gathered
        return of_tokens[: layout.num_tokens][part]
    return of_tokens.index_select(0, inputs.logits_indices[part])
