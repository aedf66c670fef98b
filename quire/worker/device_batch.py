"""The rows of the batch as a device keeps them, and a step's inputs made from them there.

Invariant: the device's rows differ from the host's only by what the next step that reads them uploads, and by sampled
tokens, which they have first where the device samples. A step's uploads travel as one block of int32 numbers in one
copy. The tensors that a step reads keep their addresses, so a captured graph may read them; work that is in flight has
read them before they change, because all of it runs in order.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata
from quire.kernels.triton import batch as kernels
from quire.kernels.triton.batch import StagedStep
from quire.layers.step import StepContext
from quire.worker.block_table import BlockTable
from quire.worker.devices import Transfers
from quire.worker.graph_shapes import GraphShape
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import (
    StepInputs,
    StepLayout,
    gather_adapter_slots,
    gather_token_types,
    group_metadata,
    has_token_types,
)


class _Segments(NamedTuple):
    """Pieces of host rows that the device does not have yet."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    source: NDArray[np.int32]
    """The host's rows."""

    def numbers(self, first_value: int) -> list[NDArray[np.int32]]:
        """As `kernels.write_segments` reads them: four numbers of each, then the values, which begin there."""
        lengths = self.ends - self.starts
        begins = first_value + lengths.cumsum() - lengths
        places = np.concatenate((self.rows, self.starts, begins, lengths)).astype(np.int32)
        pieces = zip(self.rows.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)
        return [places, *(self.source[row, start:end] for row, start, end in pieces)]

    @property
    def size(self) -> int:
        return 4 * len(self.rows) + int((self.ends - self.starts).sum())

    @property
    def longest(self) -> int:
        return int((self.ends - self.starts).max(initial=0))


class _Group:
    """One KV cache group: its block tables by row, and the tables and slots [tokens] of the step."""

    def __init__(self, table: BlockTable, slots: Tensor) -> None:
        self.table = table
        self.slots = slots
        self.rows = torch.zeros(table.block_ids.shape, dtype=torch.int32, device=slots.device)
        self.tables = torch.zeros_like(self.rows)
        self._num_blocks: NDArray[np.int64] = np.zeros(len(table.block_ids), dtype=np.int64)

    def new_segments(self, rows: NDArray[np.int64], is_new: NDArray[np.bool_]) -> _Segments:
        """The blocks that were added to these rows since the last step that had them; all, in a row that is new."""
        known = np.where(is_new, 0, self._num_blocks[rows])
        now = self.table.num_blocks[rows]
        self._num_blocks[rows] = now
        grown = now > known
        return _Segments(rows[grown], known[grown], now[grown], self.table.block_ids)

    def metadata(
        self,
        starts: Tensor,
        lengths: Tensor,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        longest: int,
        kept_lens: Tensor,
    ) -> GroupMetadata:
        return group_metadata(
            self.table,
            query_start_loc=starts[: num_requests + 1],
            seq_lens=lengths[:num_requests],
            block_tables=self.tables[:num_requests],
            slots=self.slots[:num_tokens],
            max_query_len=max_query_len,
            max_seq_len=longest,
            kept_lens=kept_lens[:num_requests],
        )


class DeviceBatch:
    """The device's copy of an `InputBatch`, which it tells where its tokens are.

    Args:
        batch: the host's rows; if some device batch has their tokens already, this one reads them there.
        max_num_tokens: most tokens of a step, padding included.
        samples_here: whether sampled tokens come by `keep`; else they are in the host's rows when a step reads them.
    """

    def __init__(
        self, batch: InputBatch, max_num_tokens: int, transfers: Transfers, *, samples_here: bool = True
    ) -> None:
        on = transfers.torch_device
        self._batch = batch
        self._transfers = transfers
        self._samples_here = samples_here
        self._max_seq_len = batch.max_model_len
        self._has_tokens = batch.device_tokens is None
        if batch.device_tokens is None:
            batch.device_tokens = torch.zeros(batch.token_ids.shape, dtype=torch.int32, device=on)
        self._tokens = batch.device_tokens
        # Ids, positions and the slots of each group, so that one launch makes padding of some tokens; 16 bytes aligned.
        places = (2 + len(batch.block_tables), max_num_tokens + max_num_tokens % 2)
        self._of_tokens = torch.zeros(places, dtype=torch.int64, device=on)
        self._input_ids, self._positions, *slots = self._of_tokens.unbind()
        self._padding = torch.tensor([[0], [0], *([-1] for _ in slots)], device=on)
        self._groups = [_Group(*pair) for pair in zip(batch.block_tables, slots, strict=True)]
        self._generations: NDArray[np.int64] = np.full(batch.max_num_seqs, -1, dtype=np.int64)
        self._starts = torch.zeros(batch.max_num_seqs + 1, dtype=torch.int32, device=on)
        self._one_each = torch.arange(batch.max_num_seqs + 1, dtype=torch.int32, device=on)
        self._lengths = torch.zeros(batch.max_num_seqs, dtype=torch.int32, device=on)
        self._kept = torch.zeros_like(self._lengths)
        """Tokens behind which requests leave their states, if there are any: all but drafts."""
        self._adapter_rows = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=on)
        self._step = StagedStep(torch.zeros(1, dtype=torch.int32, device=on), 0, 0)

    def gather(self, layout: StepLayout, graph: GraphShape | None = None) -> StepInputs:
        """Upload what is new and make the inputs of a step, for the graph of a shape that holds it if one is given."""
        slots = self._padded_slots(layout, graph)
        num_padded = len(layout.rows) if graph is None else graph.num_requests
        # Of a step that only decodes, kernels know padding by its place; else it is requests without tokens.
        num_requests = len(layout.rows) if graph is None or graph.is_decode else num_padded
        self._step, writes = self._upload(layout, num_requests, slots)
        adapts, num_sampling = slots is not None, len(layout.sampling)
        if slots is not None:
            self._adapter_rows[: len(slots)].copy_(self._step.numbers[-len(slots) :])
        for target, first_segment, segments in writes:
            kernels.write_segments(
                target, self._step.numbers, first_segment, len(segments.rows), segments.longest
            )
        self._prepare(num_padded, layout.max_query_len, layout.max_seq_len)
        self._leave_drafts_out(layout, num_padded)
        first = 3 * num_requests + 1 + num_sampling
        logits_indices = self._step.numbers[first : first + num_sampling]
        if graph is not None:
            if not graph.is_decode:
                self._make_padding(layout.num_tokens, graph.num_tokens)
            ids, positions, step = self.fixed_inputs(graph, adapts=adapts)
            return StepInputs(layout, ids, positions, logits_indices, step, graph)
        ids, positions = self._input_ids[: layout.num_tokens], self._positions[: layout.num_tokens]
        shapes = (num_requests, layout.num_tokens, layout.max_query_len, layout.max_seq_len)
        types = gather_token_types(self._batch, layout)
        token_types = None if types is None else self._transfers.upload(types)
        step = self._context(*shapes, adapts=adapts, token_types=token_types)
        return StepInputs(layout, ids, positions, logits_indices, step)

    def fixed_inputs(self, shape: GraphShape, *, adapts: bool = False) -> tuple[Tensor, Tensor, StepContext]:
        """Ids, positions and context of any step of a shape, at their lasting addresses.

        Nothing in them depends on the step, so what is launched with them can be captured.
        """
        step = self._context(*shape, self._max_seq_len, adapts=adapts)
        return self._input_ids[: shape.num_tokens], self._positions[: shape.num_tokens], step

    def blank(self, shape: GraphShape) -> None:
        """Make all of a shape padding."""
        starts = self._starts[: shape.num_requests + 1]
        starts.zero_()
        if shape.is_decode:
            starts.copy_(self._one_each[: len(starts)])
        self._lengths[: shape.num_requests].zero_()
        self._kept[: shape.num_requests].zero_()
        self._adapter_rows[: shape.num_tokens].fill_(-1)
        self._make_padding(0, shape.num_tokens)

    def has_token_types(self, layout: StepLayout) -> bool:
        """Whether a step has inputs that no graph reads."""
        return has_token_types(self._batch, layout)

    def has_adapters(self, layout: StepLayout) -> bool:
        """Whether one of a step's tokens has an adapter."""
        return gather_adapter_slots(self._batch, layout) is not None

    def keep(self, codes: Tensor) -> None:
        """Put what the last step's requests sampled into their rows, where the next step reads it."""
        kernels.keep_sampled(self._tokens, codes, self._step)

    def _leave_drafts_out(self, layout: StepLayout, num_padded: int) -> None:
        """Where a layer keeps a state, which no draft may have a part in."""
        if any(group.table.has_states for group in self._groups):
            self._kept[:num_padded].copy_(self._lengths[:num_padded])
            if layout.num_drafts is not None:
                num_drafts = torch.from_numpy(layout.num_drafts.astype(np.int32))
                self._kept[: len(num_drafts)].sub_(self._transfers.upload(num_drafts))

    def _make_padding(self, first: int, end: int) -> None:
        """Of tokens that no request has."""
        if first < end:
            self._of_tokens[:, first:end].copy_(self._padding)

    def _padded_slots(self, layout: StepLayout, graph: GraphShape | None) -> NDArray[np.int32] | None:
        """Slots of the adapters of tokens and padding, which has none; None: neither has any of the tokens."""
        slots = gather_adapter_slots(self._batch, layout)
        if slots is None or graph is None:
            return slots
        return np.pad(slots, (0, graph.num_tokens - layout.num_tokens), constant_values=-1)

    def _upload(
        self, layout: StepLayout, num_requests: int, adapter_slots: NDArray[np.int32] | None
    ) -> tuple[StagedStep, list[tuple[Tensor, int, _Segments]]]:
        """Behind the step's requests others without tokens, and the slots of adapters, if any, as the last numbers."""
        rows, sampling = layout.rows, layout.sampling
        none = np.zeros(num_requests - len(rows), dtype=np.int64)
        parts: list[NDArray[np.generic]] = [rows, none, layout.starts, none]
        parts += [layout.query_start_loc, none + layout.num_tokens, sampling, layout.logits_indices]
        is_new = self._generations[rows] != self._batch.generations[rows]
        self._generations[rows] = self._batch.generations[rows]
        pieces = [(self._tokens, self._new_tokens(layout, is_new))]
        pieces += [(group.rows, group.new_segments(rows, is_new)) for group in self._groups]
        sizes = [sum(map(len, parts)), *(segments.size for _, segments in pieces)]
        writes = []
        for (target, segments), first in zip(pieces, accumulate(sizes), strict=False):
            parts += segments.numbers(first + 4 * len(segments.rows))
            writes.append((target, first, segments))
        if adapter_slots is not None:
            parts.append(adapter_slots)
        numbers = np.concatenate(parts).astype(np.int32, copy=False)
        return StagedStep(
            self._transfers.upload(torch.from_numpy(numbers)), num_requests, len(sampling)
        ), writes

    def _new_tokens(self, layout: StepLayout, is_new: NDArray[np.bool_]) -> _Segments:
        """All tokens of a row that is new, drafts, and those of the step that are sampled elsewhere, unless somebody
        else uploads them."""
        known = self._batch.num_tokens[layout.rows]
        starts = np.where(is_new, 0, known if self._samples_here else np.minimum(layout.starts, known))
        ends = known if layout.num_drafts is None else known + layout.num_drafts
        has_some = (ends > starts) & self._has_tokens
        return _Segments(layout.rows[has_some], starts[has_some], ends[has_some], self._batch.token_ids)

    def _prepare(self, num_padded: int, max_query_len: int, max_seq_len: int) -> None:
        tokens = (self._input_ids, self._positions, self._starts, self._lengths)
        kernels.prepare_tokens(*tokens, self._step, self._tokens, num_padded, max_query_len)
        for group in self._groups:
            kernels.prepare_blocks(
                group.slots,
                group.tables,
                self._step,
                group.rows,
                group.table.block_size,
                num_padded,
                max_query_len,
                max_seq_len,
            )

    def _context(
        self,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        longest: int,
        *,
        adapts: bool,
        token_types: Tensor | None = None,
    ) -> StepContext:
        shapes = (num_requests, num_tokens, max_query_len, longest)
        groups = tuple(
            group.metadata(self._starts, self._lengths, *shapes, self._kept) for group in self._groups
        )
        adapter_rows = self._adapter_rows[:num_tokens] if adapts else None
        return StepContext(groups, adapter_rows, token_types=token_types)
