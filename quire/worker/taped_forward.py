"""The forward pass of a CPU: steps that only decode are played from a tape, one per number of requests, and another
where some of them have adapters.

Numbers of requests are not rounded up to few sizes, as those of CUDA graphs are: on a CPU a padded row costs as much as
any other, and what tapes take is bounded all the same. Their tensors share one arena, which the largest of them fills,
and at most `MAX_TAPES` are kept.

Invariant: a tape has the kernels, and so the bits, of the pass that it was recorded from. Whatever differs from step to
step is copied to where the tape reads it; models and steps that cannot be recorded run as they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata
from quire.kernels.cpu.tape import Arena, ArenaFullError, RecordingError, Tape, record
from quire.layers.step import StepContext
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import LanguageModel, eager_forward

logger = logging.getLogger(__name__)

MAX_TAPES = 64
"""Recorded calls take some 0.5 KB each, so a tape of a large model about 150 KB; the tapes last played are kept."""


class TapedForward:
    """Inputs of a step -> hidden states [T, H], which the next step may overwrite.

    Args:
        model: loaded, its KV cache bound.
        max_num_seqs: most requests of a step.
        table_widths: for each KV cache group, block ids of the longest request.
        arena_bytes: memory for the tensors of tapes; a step that needs more runs as it is.
    """

    def __init__(
        self, model: LanguageModel, max_num_seqs: int, table_widths: tuple[int, ...], arena_bytes: int
    ) -> None:
        self._eager = eager_forward(model)
        self._max_taped = max_num_seqs
        self._places = _Places(max_num_seqs, table_widths)
        self._arena = Arena(arena_bytes)
        self._tapes: OrderedDict[tuple[int, bool], Tape] = OrderedDict()

    def __call__(self, inputs: StepInputs) -> Tensor:
        num_requests = len(inputs.layout.rows)
        if num_requests > self._max_taped or len(inputs.input_ids) != num_requests:
            return self._eager(inputs)
        placed = self._places.place(inputs)
        tape = self._tapes.get(_kind_of(placed))
        if tape is None:
            return self._record(placed)
        self._tapes.move_to_end(_kind_of(placed))
        if not tape.play():
            self._eager(placed)  # raises what the kernel has to say
            raise EngineError("a kernel refused a recorded step and took the same step afterwards")
        return tape.result

    def _record(self, placed: StepInputs) -> Tensor:
        """Run a step for the first time with so many requests."""
        num_requests = len(placed.layout.rows)
        try:
            tape = record(lambda: self._eager(placed), self._arena)
        except RecordingError as reason:
            self._max_taped = num_requests - 1 if isinstance(reason, ArenaFullError) else 0
            logger.info("steps of over %d requests are not recorded: %s", self._max_taped, reason)
            return self._eager(placed)
        self._tapes[_kind_of(placed)] = tape
        if len(self._tapes) > MAX_TAPES:
            self._tapes.popitem(last=False)
        return tape.result


def _kind_of(inputs: StepInputs) -> tuple[int, bool]:
    """What two steps of one tape have in common: how many requests they have, and whether some have adapters."""
    return len(inputs.layout.rows), inputs.step.adapter_rows is not None


class _Places:
    """Where tapes read the inputs of a step; tapes of fewer requests read the first rows."""

    def __init__(self, max_num_seqs: int, table_widths: tuple[int, ...]) -> None:
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._adapter_rows = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._slots = [torch.zeros(max_num_seqs, dtype=torch.int64) for _ in table_widths]
        self._tables = [torch.zeros(max_num_seqs, width, dtype=torch.int32) for width in table_widths]

    def place(self, inputs: StepInputs) -> StepInputs:
        """The same step, its tensors in their places; each request has one token."""
        size = len(inputs.layout.rows)
        self._input_ids[:size] = inputs.input_ids
        self._positions[:size] = inputs.positions
        step = inputs.step
        assert step.intermediate is None, "there is no place for them"
        self._seq_lens[:size] = step.groups[0].seq_lens
        for own, slots, table in zip(step.groups, self._slots, self._tables, strict=True):
            if isinstance(own, AttentionMetadata):
                slots[:size] = own.slot_mapping
            table[:size, : own.block_tables.shape[1]] = own.block_tables
        adapter_rows = None
        if step.adapter_rows is not None:
            adapter_rows = self._adapter_rows[:size]
            adapter_rows.copy_(step.adapter_rows)
        groups = tuple(map(self._metadata, step.groups, self._slots, self._tables))
        return replace(
            inputs,
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            step=StepContext(groups, adapter_rows),
        )

    def _metadata(self, own: GroupMetadata, slots: Tensor, table: Tensor) -> GroupMetadata:
        size = len(own.seq_lens)
        places = {
            "query_start_loc": self._starts[: size + 1],
            "seq_lens": self._seq_lens[:size],
            "block_tables": table[:size],
        }
        if isinstance(own, AttentionMetadata):
            places["slot_mapping"] = slots[:size]
        return replace(own, **places)  # type: ignore[arg-type]
