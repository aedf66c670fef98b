# SPDX-License-Identifier: Apache-2.0
"""Forward pass of a CPU with replay of small steps: one recorded kernel graph for any number of requests and tokens.

There is another graph for steps of one token, and others for steps with adapters or token types. Sizes are not rounded
up, as for CUDA graphs: on a CPU a padded row costs as much as any other. The tensors of all graphs share one arena,
which the largest step fills.

Invariant: a graph has the kernels, and so the bits, of the recorded pass. Inputs that differ between steps are copied
to the buffers that the graph reads; models and steps that cannot be recorded run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, StateMetadata
from quire.kernels.cpu.arena import Arena, ArenaFullError
from quire.kernels.cpu.recorded_graph import RecordedGraph, RecordingError, record
from quire.kernels.cpu.sized_graph import SizedGraph, StepSize, record_sized
from quire.layers.step import StepContext
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import PipelineModel, eager_forward

logger = logging.getLogger(__name__)

_Traits = tuple[bool, bool, bool]
"""Flags of a step: its tokens have adapters; its tokens have types; encoders' outputs of any length precede them."""


class RecordedForward:
    """Inputs of a step -> hidden states [T, H], which the next step may overwrite.

    Args:
        model: loaded, its KV cache bound.
        max_num_tokens: most tokens of a recorded step.
        table_widths: for each KV cache group, block ids of the longest request.
        arena_bytes: memory for the tensors of graphs; a step that needs more runs eagerly.
    """

    def __init__(
        self, model: PipelineModel, max_num_tokens: int, table_widths: tuple[int, ...], arena_bytes: int
    ) -> None:
        self._eager = eager_forward(model)
        self._max_recorded = max_num_tokens
        self.places = GraphInputs(max_num_tokens, table_widths)
        self._arena = Arena(arena_bytes)
        self._of_one: dict[_Traits, RecordedGraph] = {}
        self._of_more: dict[_Traits, SizedGraph] = {}

    def __call__(self, inputs: StepInputs) -> Tensor:
        self.record(inputs)
        if not self.takes(inputs):
            return self._eager(inputs)
        self.places.fill(inputs)
        return self.player(inputs)()

    def takes(self, inputs: StepInputs) -> bool:
        """Return whether steps like this one are recorded: those of its size, without media."""
        return _size_of(inputs).tokens <= self._max_recorded and not has_media(inputs.step)

    def player(self, inputs: StepInputs) -> Callable[[], Tensor]:
        """Return a function that computes a step like this one from the contents of `places`."""
        size, traits = _size_of(inputs), _traits_of(inputs)
        if size.tokens == 1:
            return partial(self._play_one, inputs, traits)
        return partial(self._play, inputs, size, traits)

    def record(self, inputs: StepInputs) -> None:
        """Record steps like this one, of several tokens, unless they are recorded; nothing is computed."""
        traits = _traits_of(inputs)
        if _size_of(inputs).tokens > 1 and self.takes(inputs) and traits not in self._of_more:
            self._record_open(inputs, traits)

    def _play(self, inputs: StepInputs, size: StepSize, traits: _Traits) -> Tensor:
        graph = self._of_more[traits]
        self._check(inputs, graph.replay(size))
        return graph.result(size.tokens)

    def _play_one(self, inputs: StepInputs, traits: _Traits) -> Tensor:
        graph = self._of_one.get(traits)
        if graph is not None:
            self._check(inputs, graph.replay())
            return graph.result
        placed = self.places.of(inputs, _size_of(inputs))
        try:
            graph = self._of_one[traits] = record(lambda: self._eager(placed), self._arena)
        except (RecordingError, ArenaFullError) as reason:
            self._record_no_more_than(0, reason)
            return self._eager(placed)
        return graph.result

    def _record_open(self, inputs: StepInputs, traits: _Traits) -> None:
        """Record steps like this one, of any size; if memory is short, of fewer tokens."""
        self.places.fill(inputs)  # allocates all buffers before recording
        while self._max_recorded > 1 and traits not in self._of_more:
            largest = StepSize(self._max_recorded, self._max_recorded)
            try:
                self._of_more[traits] = record_sized(
                    lambda size: self._eager(self.places.of(inputs, size)), largest, self._arena
                )
            except ArenaFullError as reason:
                self._record_no_more_than(self._max_recorded // 2, reason)
            except RecordingError as reason:
                self._record_no_more_than(1, reason)

    def _record_no_more_than(self, num_tokens: int, reason: Exception) -> None:
        self._max_recorded = num_tokens
        logger.info("steps of over %d tokens are not recorded: %s", num_tokens, reason)

    def _check(self, inputs: StepInputs, was_played: bool) -> None:
        if not was_played:
            self._eager(self.places.of(inputs, _size_of(inputs)))  # raises the kernel's own error
            raise EngineError("a kernel refused a recorded step and took the same step afterwards")


def has_media(step: StepContext) -> bool:
    """Return whether images or other media determine something of the step that no graph reads."""
    sees_ahead = any(isinstance(own, AttentionMetadata) and own.last_seen is not None for own in step.groups)
    is_encoded = step.encoded_lens is not None and step.encoded_rows is None
    return sees_ahead or is_encoded or step.media is not None or step.rope_positions is not None


def _size_of(inputs: StepInputs) -> StepSize:
    return StepSize(len(inputs.layout.rows), inputs.layout.num_tokens)


def _traits_of(inputs: StepInputs) -> _Traits:
    step = inputs.step
    return step.adapter_rows is not None, step.token_types is not None, step.encoded_rows is not None


class GraphInputs:
    """Input buffers of recorded graphs; graphs of fewer requests or tokens read the first rows."""

    def __init__(self, max_num_tokens: int, table_widths: tuple[int, ...]) -> None:
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._starts = torch.zeros(max_num_tokens + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._kept_lens = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._adapter_rows = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._token_types = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._encoded_lens = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._encoded_rows = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._slots = [torch.zeros(max_num_tokens, dtype=torch.int64) for _ in table_widths]
        self._tables = [torch.zeros(max_num_tokens, width, dtype=torch.int32) for width in table_widths]
        self._intermediate: dict[str, Tensor] = {}
        lengths = self._positions, self._seq_lens, self._kept_lens
        self._ids_array, self._growing = self._input_ids.numpy(), [each.numpy() for each in lengths]
        self._slot_arrays = [slots.numpy() for slots in self._slots]

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's tensors to the buffers."""
        requests, tokens = _size_of(inputs)
        self._input_ids[:tokens] = inputs.input_ids
        self._positions[:tokens] = inputs.positions
        step = inputs.step
        self._starts[: requests + 1] = step.groups[0].query_start_loc
        self._seq_lens[:requests] = step.groups[0].seq_lens
        for own, slots, table in zip(step.groups, self._slots, self._tables, strict=True):
            if isinstance(own, AttentionMetadata):
                slots[:tokens] = own.slot_mapping
            if isinstance(own, StateMetadata):
                self._kept_lens[:requests] = own.kept
            table[:requests, : own.block_tables.shape[1]] = own.block_tables
        for rows, place in (
            (step.adapter_rows, self._adapter_rows),
            (step.token_types, self._token_types),
            (step.encoded_rows, self._encoded_rows),
            (step.encoded_lens, self._encoded_lens),
        ):
            if rows is not None:
                place[: len(rows)] = rows
        for name, rows in (step.intermediate or {}).items():
            self._handed_over(name, rows)[:tokens] = rows

    def go_on(self, token_ids: NDArray[np.int64], slots: Iterable[NDArray[np.int64]]) -> None:
        """Advance a step of one token of each request to the next one.

        Args:
            token_ids: the next inputs [R].
            slots: of their keys and values in each group's cache, [R] each.
        """
        count = len(token_ids)
        self._ids_array[:count] = token_ids
        for each in self._growing:
            each[:count] += 1
        for place, own in zip(self._slot_arrays, slots, strict=True):
            place[:count] = own

    def widen(self, tables: Sequence[NDArray[np.int32]]) -> None:
        """Set block tables with more blocks of each request, [R, blocks] of each group."""
        for place, table in zip(self._tables, tables, strict=True):
            place.numpy()[: len(table), : table.shape[1]] = table

    def of(self, inputs: StepInputs, size: StepSize) -> StepInputs:
        """Return a step like this one but of that size, with tensors in the buffers."""
        step, tokens = inputs.step, size.tokens
        handed_over = {
            name: self._handed_over(name, rows)[:tokens] for name, rows in (step.intermediate or {}).items()
        }
        context = StepContext(
            tuple(
                self._metadata(*each, size)
                for each in zip(step.groups, self._slots, self._tables, strict=True)
            ),
            None if step.adapter_rows is None else self._adapter_rows[:tokens],
            None if step.token_types is None else self._token_types[:tokens],
            None if step.intermediate is None else handed_over,
            encoded_lens=None if step.encoded_lens is None else self._encoded_lens[: size.requests],
            encoded_rows=None if step.encoded_rows is None else self._encoded_rows[:tokens],
        )
        return replace(
            inputs, input_ids=self._input_ids[:tokens], positions=self._positions[:tokens], step=context
        )

    def _handed_over(self, name: str, rows: Tensor) -> Tensor:
        """Return the buffer of rows that a model reads beside tokens: in every step or in none, always of one width."""
        if name not in self._intermediate:
            self._intermediate[name] = rows.new_zeros(len(self._input_ids), rows.shape[1])
        return self._intermediate[name]

    def _metadata(self, own: GroupMetadata, slots: Tensor, table: Tensor, size: StepSize) -> GroupMetadata:
        requests, tokens = size
        places = {
            "query_start_loc": self._starts[: requests + 1],
            "seq_lens": self._seq_lens[:requests],
            "block_tables": table[:requests],
        }
        if isinstance(own, AttentionMetadata):
            places["slot_mapping"] = slots[:tokens]
        if isinstance(own, StateMetadata):
            places["kept_lens"] = self._kept_lens[:requests]
        return replace(own, **places)  # type: ignore[arg-type]
