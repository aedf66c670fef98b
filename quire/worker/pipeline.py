"""How a step's inputs are made and the model is run on them, and how the host does it.

Invariant: `gather`, `forward` and `keep` are called in this order, once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.layers.step import StepContext
from quire.scheduler.output import NewRequestData
from quire.worker.graphs import GraphRoom
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout, first_tokens, gather_inputs
from quire.worker.sampler import Sampler


class Body(Protocol):
    """What a pipeline needs of a model."""

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Ids and positions [T] int64 -> hidden states [T, H]."""


class LanguageModel(Body, Protocol):
    """What the runner needs of a model."""

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        """[N, H], and perhaps the adapter of each [N], -> [N, V] float32, a tensor the caller may change.

        With `num_added` there are so many more, of tokens that adapters add; others than a row's own mean nothing.
        """

    def apply_heads(self, pooled: Tensor, task: str, adapter_rows: Tensor | None = None) -> Tensor:
        """Of a model that is pooled, for a task: float32 [N, H], and perhaps the adapter of each -> [N, size]."""


Forward = Callable[[StepInputs], Tensor]
"""Hidden states [T, H] of a step, which the next step may overwrite."""


def eager_forward(model: Body) -> Forward:
    """Calls the model as it is, each time."""
    return lambda inputs: model.forward(inputs.input_ids, inputs.positions, inputs.step)


class Rounds(Protocol):
    """Generates further tokens of a step's requests."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """A request was given a row."""

    def remove_request(self, row: int) -> None:
        """It has lost it."""

    def more(
        self,
        inputs: StepInputs,
        token_ids: NDArray[np.int64],
        sampler: Sampler,
        num_rounds: int,
        took_s: float,
    ) -> list[NDArray[np.int64]]:
        """What follows the tokens [R] that a step has sampled in so much time: [R] of each round, at most so many."""


class Pipeline(Protocol):
    """A device's way from rows to hidden states."""

    reads_host_tokens: bool
    """Whether `gather` reads sampled tokens from the host's rows; else `keep` has put them where it reads them."""

    @property
    def room(self) -> GraphRoom | None:
        """Where what comes behind the model may make graphs, too; None: nothing is recorded."""

    @property
    def rounds(self) -> Rounds | None:
        """None: a step is one round."""

    def gather(self, layout: StepLayout) -> StepInputs:
        """See `gather_inputs`."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states, a row for each token and perhaps more behind them, which the next step may overwrite."""

    def keep(self, codes: list[Tensor]) -> None:
        """Take in what the step's requests sampled: `Sampled.codes` of all that do, in order."""

    def prepare(self) -> None:
        """Do before the first step what should not hold one up."""


class HostPipeline:
    """numpy and the model, one call after the other.

    Args:
        record: has steps like a given one recorded, whatever their size, and computes none of them.
        rounds: what a step may have behind it.
    """

    reads_host_tokens = True
    room: GraphRoom | None = None

    def __init__(
        self,
        batch: InputBatch,
        forward: Forward,
        record: Callable[[StepInputs], None] | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        self.rounds = rounds
        self._batch = batch
        self._forward = forward
        self._record = record

    def gather(self, layout: StepLayout) -> StepInputs:
        return gather_inputs(self._batch, layout)

    def forward(self, inputs: StepInputs) -> Tensor:
        return self._forward(inputs)

    def keep(self, codes: list[Tensor]) -> None:
        """The runner appends them to the host's rows."""

    def prepare(self) -> None:
        """Only to record is slow the first time."""
        if self._record is not None:
            self._record(self.gather(first_tokens(2)))  # one token's steps have a recording of their own
