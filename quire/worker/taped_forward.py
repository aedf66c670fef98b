"""The forward pass of a CPU: steps that only generate, and small ones of encoders, are played from a tape, one for each
number of requests and of tokens, and another where some of them have adapters or are of second texts.

There are more tokens than requests where drafts are verified. Neither number is rounded up to few sizes, as those of
CUDA graphs are: on a CPU a padded row costs as much as any other, and what tapes take is bounded all the same. Their
tensors share one arena, which the largest of them fills, and at most `MAX_TAPES` are kept.

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
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, StateMetadata
from quire.kernels.cpu.tape import Arena, ArenaFullError, RecordingError, Tape, record
from quire.layers.step import StepContext
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import Body, eager_forward

logger = logging.getLogger(__name__)

MAX_TAPES = 128
"""Recorded calls take some 0.5 KB each, so a tape of a large model about 150 KB; the tapes last played are kept."""


_Kind = tuple[int, int, bool, bool]
"""What steps of one tape have in common: how many requests and tokens, and whether tokens have adapters, and types."""


class TapedForward:
    """Inputs of a step -> hidden states [T, H], which the next step may overwrite.

    Args:
        model: loaded, its KV cache bound.
        max_num_tokens: most tokens of a step that is taped.
        table_widths: for each KV cache group, block ids of the longest request.
        arena_bytes: memory for the tensors of tapes; a step that needs more runs as it is.
        is_encoder: whether steps have texts whole, so that nothing but the elements of tensors tells one from another.
    """

    def __init__(
        self,
        model: Body,
        max_num_tokens: int,
        table_widths: tuple[int, ...],
        arena_bytes: int,
        *,
        is_encoder: bool = False,
    ) -> None:
        self._eager = eager_forward(model)
        self._max_taped = max_num_tokens
        self._is_encoder = is_encoder
        self._places = _Places(max_num_tokens, table_widths)
        self._arena = Arena(arena_bytes)
        self._tapes: OrderedDict[_Kind, Tape] = OrderedDict()

    def __call__(self, inputs: StepInputs) -> Tensor:
        layout = inputs.layout
        is_taped = layout.only_generates or self._is_encoder
        if layout.num_tokens > self._max_taped or not is_taped:
            return self._eager(inputs)
        placed = self._places.place(inputs)
        kind = _kind_of(placed)
        tape = self._tapes.get(kind)
        if tape is None:
            return self._record(placed, kind)
        self._tapes.move_to_end(kind)
        if not tape.play():
            self._eager(placed)  # raises what the kernel has to say
            raise EngineError("a kernel refused a recorded step and took the same step afterwards")
        return tape.result

    def _record(self, placed: StepInputs, kind: _Kind) -> Tensor:
        """Run the first step of its kind."""
        try:
            tape = record(lambda: self._eager(placed), self._arena)
        except RecordingError as reason:
            self._max_taped = placed.layout.num_tokens - 1 if isinstance(reason, ArenaFullError) else 0
            logger.info("steps of over %d tokens are not recorded: %s", self._max_taped, reason)
            return self._eager(placed)
        self._tapes[kind] = tape
        if len(self._tapes) > MAX_TAPES:
            self._tapes.popitem(last=False)
        return tape.result


def _kind_of(inputs: StepInputs) -> _Kind:
    layout, step = inputs.layout, inputs.step
    return len(layout.rows), layout.num_tokens, step.adapter_rows is not None, step.token_types is not None


class _Places:
    """Where tapes read the inputs of a step; tapes of fewer requests or tokens read the first rows."""

    def __init__(self, max_num_tokens: int, table_widths: tuple[int, ...]) -> None:
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._starts = torch.zeros(max_num_tokens + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._kept_lens = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._adapter_rows = torch.zeros(max_num_tokens, dtype=torch.int32)
        self._token_types = torch.zeros(max_num_tokens, dtype=torch.int64)
        self._slots = [torch.zeros(max_num_tokens, dtype=torch.int64) for _ in table_widths]
        self._tables = [torch.zeros(max_num_tokens, width, dtype=torch.int32) for width in table_widths]
        self._intermediate: dict[str, Tensor] = {}

    def place(self, inputs: StepInputs) -> StepInputs:
        """The same step, its tensors in their places."""
        size, num_tokens = len(inputs.layout.rows), inputs.layout.num_tokens
        self._input_ids[:num_tokens] = inputs.input_ids
        self._positions[:num_tokens] = inputs.positions
        step = inputs.step
        self._starts[: size + 1] = step.groups[0].query_start_loc
        self._seq_lens[:size] = step.groups[0].seq_lens
        for own, slots, table in zip(step.groups, self._slots, self._tables, strict=True):
            if isinstance(own, AttentionMetadata):
                slots[:num_tokens] = own.slot_mapping
            if isinstance(own, StateMetadata):
                self._kept_lens[:size] = own.kept
            table[:size, : own.block_tables.shape[1]] = own.block_tables
        adapter_rows, token_types = (
            None if own is None else place[:num_tokens].copy_(own)
            for own, place in ((step.adapter_rows, self._adapter_rows), (step.token_types, self._token_types))
        )
        groups = tuple(map(self._metadata, step.groups, self._slots, self._tables))
        return replace(
            inputs,
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            step=StepContext(groups, adapter_rows, token_types, self._handed_over(step, num_tokens)),
        )

    def _handed_over(self, step: StepContext, num_tokens: int) -> dict[str, Tensor] | None:
        """Rows that a model reads beside tokens; it always does, or never, and they are always of one size."""
        if step.intermediate is None:
            return None
        for name, rows in step.intermediate.items():
            if name not in self._intermediate:
                self._intermediate[name] = rows.new_zeros(len(self._input_ids), rows.shape[1])
            self._intermediate[name][:num_tokens] = rows
        return {name: place[:num_tokens] for name, place in self._intermediate.items()}

    def _metadata(self, own: GroupMetadata, slots: Tensor, table: Tensor) -> GroupMetadata:
        size = len(own.seq_lens)
        places = {
            "query_start_loc": self._starts[: size + 1],
            "seq_lens": self._seq_lens[:size],
            "block_tables": table[:size],
        }
        if isinstance(own, AttentionMetadata):
            places["slot_mapping"] = slots[: len(own.slot_mapping)]
        if isinstance(own, StateMetadata):
            places["kept_lens"] = self._kept_lens[:size]
        return replace(own, **places)  # type: ignore[arg-type]
