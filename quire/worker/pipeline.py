# SPDX-License-Identifier: Apache-2.0
"""Pipeline from rows of the batch to hidden states, and its host implementation.

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
from quire.worker.graphs import GraphMemory
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout, first_tokens, gather_inputs
from quire.worker.sampler import Sampler


class PipelineModel(Protocol):
    """Model interface of a pipeline."""

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Map ids and positions [T] int64 to hidden states [T, H]."""


class LanguageModel(PipelineModel, Protocol):
    """Model interface of the runner."""

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        """Map hidden states [N, H], and the adapter of each [N], to [N, V] float32, which the caller may change.

        With `num_added` there are that many more logits, for tokens added by adapters; only those of a row's own
        adapter are meaningful.
        """

    def apply_heads(self, pooled: Tensor, task: str, adapter_rows: Tensor | None = None) -> Tensor:
        """Map pooled states float32 [N, H], and the adapter of each, to [N, size] for a pooling task."""


Forward = Callable[[StepInputs], Tensor]
"""Computes hidden states [T, H] of a step, which the next step may overwrite."""


def eager_forward(model: PipelineModel) -> Forward:
    """Return a forward function that calls the model directly."""
    return lambda inputs: model.forward(inputs.input_ids, inputs.positions, inputs.step)


class MultiStepDecode(Protocol):
    """Multi-step decode: generates further tokens after a step."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""

    def remove_request(self, row: int) -> None:
        """Drop the state of a row."""

    def more(
        self,
        inputs: StepInputs,
        token_ids: NDArray[np.int64],
        sampler: Sampler,
        num_rounds: int,
        took_s: float,
    ) -> list[NDArray[np.int64]]:
        """Return up to `num_rounds` arrays [R] of tokens that follow `token_ids` [R].

        `took_s` is the duration of the step that sampled `token_ids`.
        """


class Pipeline(Protocol):
    """Device-specific path from rows to hidden states."""

    reads_host_tokens: bool
    """True if `gather` reads sampled tokens from the host's rows; else `keep` has stored them on the device."""

    @property
    def room(self) -> GraphMemory | None:
        """Shared graph memory, for graphs of what follows the model; None: nothing is captured."""

    @property
    def rounds(self) -> MultiStepDecode | None:
        """Multi-step decode; None: not supported."""

    def gather(self, layout: StepLayout) -> StepInputs:
        """Gather the inputs of a layout; see `gather_inputs`."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Return hidden states, one row per token and perhaps padding; the next step may overwrite them."""

    def keep(self, codes: list[Tensor]) -> None:
        """Store what the step sampled: `Sampled.codes` of all samples, in order."""

    def prepare(self) -> None:
        """Do one-time work before the first step."""


class HostPipeline:
    """Pipeline of the host: numpy gather, then the model.

    Args:
        record: records steps like a given one, of any size, without computing them.
        rounds: multi-step decode after a step, if supported.
    """

    reads_host_tokens = True
    room: GraphMemory | None = None

    def __init__(
        self,
        batch: InputBatch,
        forward: Forward,
        record: Callable[[StepInputs], None] | None = None,
        rounds: MultiStepDecode | None = None,
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
        """Do nothing: the runner appends the tokens to the host's rows."""

    def prepare(self) -> None:
        """Record the step, which is slow the first time."""
        if self._record is not None:
            self._record(self.gather(first_tokens(2)))  # single-token steps are recorded separately
