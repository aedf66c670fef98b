"""What is pooled of prompts: which rows want it, and a step's share of it.

Invariant: a request's numbers depend on its own hidden states alone, whoever is in the batch and however its prompt was
cut. What is applied to them last is computed on the host, request by request, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config.pooling import TOKEN_TASKS, PoolingSpec
from quire.errors import EngineError
from quire.layers.pooling import Chunks, make_reduction
from quire.pooling_params import PoolingParams
from quire.scheduler.output import NewRequestData, Pooled
from quire.worker.devices import Transfers
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepLayout
from quire.worker.pipeline import LanguageModel

Numbers = NDArray[np.float64]
_SLICE = 64
"""Tokens whose numbers for a whole vocabulary are in memory at once."""


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
"""What `PoolingSpec.activation` names, over the last dimension."""

_BEFORE_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda numbers: numbers,
    "log1p_relu": lambda numbers: numbers.relu().log1p(),
    "log1p_log1p_relu": lambda numbers: numbers.relu().log1p().log1p(),
}
"""The same of numbers of words that are added; the greatest one stays the greatest, and comes last."""


@dataclass(frozen=True)
class _Wanted:
    """What one row's request wants, and what its chunks gave so far."""

    params: PoolingParams
    task: str
    instruction_length: int
    """Tokens at the start that are not pooled."""
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PooledNumbers:
    """A request's numbers, on their way to the host."""

    request: int
    """Its index in the step."""
    params: PoolingParams
    spec: PoolingSpec
    activation: str
    """What is still to be applied."""
    parts: list[Tensor]
    """Of its tokens [n, size] each, or its one vector [size]."""

    def read(self) -> Pooled | None:
        """What the request gets, once it is on the host; None: not all of it is finite."""
        numbers = np.concatenate([part.numpy() for part in self.parts]).astype(np.float64)
        if not np.isfinite(numbers).all():
            return None
        chosen = self.params.returned_token_ids or list(self.spec.returned_token_ids)
        if self.params.dimensions is not None:
            numbers = numbers[..., : self.params.dimensions]
        numbers = ACTIVATIONS[self.activation](numbers)
        return Pooled.of(numbers[..., chosen] if chosen else numbers)


class Pooler:
    """The rows that are pooled, and how to compute a step's share of them.

    Args:
        model: what applies its heads to vectors.
        spec: None: nothing is ever pooled.
    """

    def __init__(
        self,
        batch: InputBatch,
        model: LanguageModel,
        spec: PoolingSpec | None,
        transfers: Transfers,
    ) -> None:
        self._batch = batch
        self._model = model
        self._spec = spec
        self._transfers = transfers
        self._wanted: dict[int, _Wanted] = {}
        self._reduction = None if spec is None else make_reduction(spec.poolings, batch.max_num_seqs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row.

        Raises:
            EngineError: of one that must see all its tokens, some are not to be computed.
        """
        params, spec = request.pooling_params, self._spec
        if params is None or spec is None:
            return
        if request.num_computed_tokens and spec.reads_every_token(params):
            raise EngineError(f"{request.request_id} is pooled, and not computed from its first token on")
        length = min(request.instruction_length or 0, request.num_prompt_tokens - 1)
        self._wanted[row] = _Wanted(params, spec.task_of(params), length)

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        self._wanted.pop(row, None)

    def compute(
        self, layout: StepLayout, hidden: Tensor, adapter_rows: Tensor | None = None
    ) -> list[PooledNumbers]:
        """Take in the hidden states of a step; returns what those get whose prompts end with it.

        adapter_rows [T]: see `StepContext`.
        """
        if not self._wanted:
            return []
        wanted = [self._wanted.get(row) for row in layout.rows.tolist()]
        by_task: dict[str, list[int]] = {}
        for index, one in enumerate(wanted):
            if one is not None:
                by_task.setdefault(one.task, []).append(index)
        given: dict[int, list[Tensor]] = {}
        for task, indices in by_task.items():
            pool = self._tokens if task in TOKEN_TASKS else self._texts
            if self._spec is not None and self._spec.weighs_vocabulary:
                pool = self._words
            given |= pool(layout, hidden, adapter_rows, indices, task)
        return [
            self._numbers(index, one, given[index])
            for index, one in enumerate(wanted)
            if one and index in given
        ]

    def _numbers(self, index: int, wanted: _Wanted, parts: list[Tensor]) -> PooledNumbers:
        spec, params = self._spec, wanted.params
        assert spec is not None
        activation = "none" if spec.pooling == "sum" else spec.activation_of(params)
        return PooledNumbers(index, params, spec, activation, parts)

    def _texts(
        self, layout: StepLayout, hidden: Tensor, adapters: Tensor | None, indices: list[int], task: str
    ) -> dict[int, list[Tensor]]:
        """A vector each, of those that end, by their indices in the step."""
        assert self._reduction is not None, "a request that wants a vector is refused where there is none"
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
        """Numbers of each token, of those that end; of the others they are kept."""
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

    def _words(
        self, layout: StepLayout, hidden: Tensor, adapters: Tensor | None, indices: list[int], task: str
    ) -> dict[int, list[Tensor]]:
        """A number for each token id, of texts, which are in one step whole."""
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
        """Numbers, on their way to the host, of vectors [N, H] of the requests that have these tokens of the step."""
        own = None if adapters is None else adapters.index_select(0, tokens)
        return self._transfers.download(self._model.apply_heads(vectors, task, own))

    def _places(self, layout: StepLayout, index: int) -> NDArray[np.int64]:
        """Where, in the step, the tokens of a request are that count: all, or those that end a step of its text."""
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


def _chunks(layout: StepLayout, indices: NDArray[np.int64], lengths: NDArray[np.int64]) -> Chunks:
    """Of some requests of a step, what stands behind their instructions of such lengths."""
    starts = np.maximum(layout.starts[indices], lengths)
    return Chunks(
        layout.rows[indices],
        layout.query_start_loc[indices] + starts - layout.starts[indices],
        starts - lengths,
        layout.ends[indices] - starts,
        layout.pools[indices],
    )
