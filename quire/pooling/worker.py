# SPDX-License-Identifier: Apache-2.0
"""Pooling of prompts on the worker: per-row state, and a step's part of it.

Invariant: a request's output depends on its own hidden states only, whatever the batch and however its prompt was
chunked. So the last activation is computed on the host, per request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.config.pooling import TOKEN_TASKS, PoolingSpec
from quire.errors import EngineError
from quire.pooling.pooler import TextChunks, make_reduction
from quire.pooling_params import PoolingParams
from quire.scheduler.output import NewRequestData, Pooled
from quire.worker.feature import RunnerContext, RunnerPart, WorkerFeature
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.launched_step import LaunchedStep, StepOutcome
from quire.worker.pipeline import LanguageModel
from quire.worker.transfers import Transfers

Numbers = NDArray[np.float64]
NON_FINITE_NUMBERS = "the model produced non-finite pooling output"
_SLICE = 64  # tokens whose vocabulary logits exist at once


def _normalized(numbers: Numbers) -> Numbers:
    lengths = np.sqrt((numbers * numbers).sum(axis=-1, keepdims=True))
    units: Numbers = numbers / np.maximum(lengths, 1e-12)
    return units


def _softmax(numbers: Numbers) -> Numbers:
    powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    shares: Numbers = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _sigmoid(numbers: Numbers) -> Numbers:
    return np.exp(-np.logaddexp(0.0, -numbers))


def _log1p_relu(numbers: Numbers) -> Numbers:
    return np.log1p(np.maximum(numbers, 0.0))


def _log1p_log1p_relu(numbers: Numbers) -> Numbers:
    return np.log1p(_log1p_relu(numbers))


ACTIVATIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "none": lambda numbers: numbers,
    "normalize": _normalized,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "log1p_relu": _log1p_relu,
    "log1p_log1p_relu": _log1p_log1p_relu,
}
"""Functions of `PoolingSpec.activation`, over the last dimension."""

_BEFORE_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda numbers: numbers,
    "log1p_relu": lambda numbers: numbers.relu().log1p(),
    "log1p_log1p_relu": lambda numbers: numbers.relu().log1p().log1p(),
}
"""Activations applied before a sum over tokens; with max pooling they are applied after it."""


@dataclass(frozen=True)
class _PoolingState:
    """Pooling state of one row."""

    params: PoolingParams
    task: str
    instruction_length: int
    """Leading tokens that are not pooled."""
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PooledNumbers:
    """A request's output on its way to the host."""

    request: int
    """Index of the request in the step."""
    params: PoolingParams
    spec: PoolingSpec
    activation: str
    """Activation still to be applied."""
    parts: list[Tensor]
    """[n, size] of its tokens each, or its one vector [size]."""

    def read(self) -> Pooled | None:
        """Return the output, once it is on the host; None: some of it is not finite."""
        numbers = np.concatenate([part.numpy() for part in self.parts]).astype(np.float64)
        if not np.isfinite(numbers).all():
            return None
        chosen = self.params.returned_token_ids or list(self.spec.returned_token_ids)
        if self.params.dimensions is not None:
            numbers = numbers[..., : self.params.dimensions]
        numbers = ACTIVATIONS[self.activation](numbers)
        return Pooled.from_array(numbers[..., chosen] if chosen else numbers)


@dataclass(frozen=True)
class PooledStep:
    """Outputs of a step on their way to the host."""

    each: Sequence[PooledNumbers]

    def complete(self, step: LaunchedStep, outcome: StepOutcome) -> None:
        """Add the outputs to the outcome; a request whose numbers are not finite fails."""
        for one in self.each:
            numbers = one.read()
            if numbers is None:
                outcome.failed[one.request] = NON_FINITE_NUMBERS
            else:
                outcome.pooled[one.request] = numbers


class WorkerPooling(WorkerFeature):
    """Pooling in place of sampling."""

    @classmethod
    def is_wanted(cls, config: EngineConfig) -> bool:
        return config.pooling is not None

    def make_part(self, context: RunnerContext) -> RunnerPart | None:
        return Pooler(context.batch, context.model, context.config.pooling, context.device.transfers)


class Pooler(RunnerPart):
    """Pooling state of all rows.

    Args:
        model: applies its heads to vectors.
        spec: pooling of the model; None: it does not pool.
    """

    reads_all_tokens = True

    def __init__(
        self, batch: InputBatch, model: LanguageModel, spec: PoolingSpec | None, transfers: Transfers
    ) -> None:
        self._batch = batch
        self._model = model
        self._spec = spec
        self._transfers = transfers
        self._wanted: dict[int, _PoolingState] = {}
        self._reduction = None if spec is None else make_reduction(spec.poolings, batch.max_num_seqs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row.

        Raises:
            EngineError: a cached prefix would skip tokens that must be pooled.
        """
        params, spec = request.pooling_params, self._spec
        if params is None or spec is None:
            return
        if request.num_computed_tokens and spec.reads_every_token(params):
            raise EngineError(
                f"{request.request_id} must be pooled from its first token, but has a cached prefix"
            )
        length = min(request.instruction_length or 0, request.num_prompt_tokens - 1)
        self._wanted[row] = _PoolingState(params, spec.task_of(params), length)

    def remove_request(self, row: int) -> None:
        self._wanted.pop(row, None)

    def compute(self, inputs: StepInputs, hidden: Tensor) -> PooledStep | None:
        """Pool the hidden states of a step; return the outputs of requests whose prompts end with it."""
        if not self._wanted:
            return None
        layout, adapter_rows = inputs.layout, inputs.step.adapter_rows
        wanted = [self._wanted.get(row) for row in layout.rows.tolist()]
        by_task: dict[str, list[int]] = {}
        for index, one in enumerate(wanted):
            if one is not None:
                by_task.setdefault(one.task, []).append(index)
        given: dict[int, list[Tensor]] = {}
        for task, indices in by_task.items():
            pool = self._tokens if task in TOKEN_TASKS else self._texts
            if self._spec is not None and self._spec.weighs_vocabulary:
                pool = self._vocabulary
            given |= pool(layout, hidden, adapter_rows, indices, task)
        return PooledStep(
            [
                self._numbers(index, one, given[index])
                for index, one in enumerate(wanted)
                if one and index in given
            ]
        )

    def _numbers(self, index: int, wanted: _PoolingState, parts: list[Tensor]) -> PooledNumbers:
        spec, params = self._spec, wanted.params
        assert spec is not None
        activation = "none" if spec.pooling == "sum" else spec.activation_of(params)
        return PooledNumbers(index, params, spec, activation, parts)

    def _texts(
        self, layout: StepLayout, hidden: Tensor, adapters: Tensor | None, indices: list[int], task: str
    ) -> dict[int, list[Tensor]]:
        """Return one vector per request that ends, by index in the step."""
        assert self._reduction is not None, "the front end refuses tasks that the model does not have"
        lengths = np.array([self._wanted[int(layout.rows[index])].instruction_length for index in indices])
        is_pooled = layout.ends[indices] > lengths
        if not is_pooled.any():
            return {}
        chunks = _chunks(layout, np.array(indices)[is_pooled], lengths[is_pooled])
        vectors = self._reduction.reduce(hidden, chunks)
        if not len(vectors):
            return {}
        ended = np.array(indices)[is_pooled][chunks.is_last]
        lasts = torch.from_numpy(layout.query_start_loc[ended + 1] - 1).to(hidden.device)
        numbers = self._apply_heads(vectors, task, adapters, lasts)
        return {index: [vector] for index, vector in zip(ended.tolist(), numbers, strict=True)}

    def _tokens(
        self, layout: StepLayout, hidden: Tensor, adapters: Tensor | None, indices: list[int], task: str
    ) -> dict[int, list[Tensor]]:
        """Return vectors per token of requests that end; store those of the others."""
        places = [self._places(layout, index) for index in indices]
        chosen = torch.from_numpy(np.concatenate(places)).to(hidden.device)
        vectors = hidden.index_select(0, chosen).float()
        numbers = self._apply_heads(vectors, task, adapters, chosen)
        ended = {}
        for index, part in zip(indices, torch.split(numbers, [len(one) for one in places]), strict=True):
            wanted = self._wanted[int(layout.rows[index])]
            wanted.parts.append(part)
            if layout.pools[index]:
                ended[index] = wanted.parts
        return ended

    def _vocabulary(
        self, layout: StepLayout, hidden: Tensor, adapters: Tensor | None, indices: list[int], task: str
    ) -> dict[int, list[Tensor]]:
        """Return one number per token id; such texts are not chunked."""
        assert self._spec is not None
        given = {}
        for index in indices:
            first, last = layout.query_start_loc[index : index + 2].tolist()
            slices = [slice(start, min(start + _SLICE, last)) for start in range(first, last, _SLICE)]
            numbers = (
                self._model.apply_heads(
                    hidden[part].float(), task, None if adapters is None else adapters[part]
                )
                for part in slices
            )
            if self._spec.pooling == "sum":
                params = self._wanted[int(layout.rows[index])].params
                before = _BEFORE_SUMS[self._spec.activation_of(params)]
                pooled = torch.stack([before(one).double().sum(0) for one in numbers]).sum(0).float()
            else:
                pooled = torch.stack([one.amax(0) for one in numbers]).amax(0)
            given[index] = [self._transfers.download(pooled)]
        return given

    def _apply_heads(self, vectors: Tensor, task: str, adapters: Tensor | None, tokens: Tensor) -> Tensor:
        """Apply the heads to vectors [N, H] of requests that own these tokens, and start the download."""
        own = None if adapters is None else adapters.index_select(0, tokens)
        return self._transfers.download(self._model.apply_heads(vectors, task, own))

    def _places(self, layout: StepLayout, index: int) -> NDArray[np.int64]:
        """Return flat indices of a request's pooled tokens: all, or its step tags."""
        assert self._spec is not None
        first, last = layout.query_start_loc[index : index + 2]
        tag = self._wanted[int(layout.rows[index])].params.step_tag_id
        tag = self._spec.step_token_id if tag is None else tag
        if self._spec.pooling != "step" or tag is None:
            return np.arange(first, last)
        start, end = layout.starts[index], layout.ends[index]
        is_tag = self._batch.token_ids[layout.rows[index], start:end] == tag
        tagged: NDArray[np.int64] = first + np.flatnonzero(is_tag)
        return tagged


def _chunks(layout: StepLayout, indices: NDArray[np.int64], lengths: NDArray[np.int64]) -> TextChunks:
    """Return the chunks of some requests, after their instructions of these lengths."""
    starts = np.maximum(layout.starts[indices], lengths)
    return TextChunks(
        layout.rows[indices],
        layout.query_start_loc[indices] + starts - layout.starts[indices],
        starts - lengths,
        layout.ends[indices] - starts,
        layout.pools[indices],
    )
