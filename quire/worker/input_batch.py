# SPDX-License-Identifier: Apache-2.0
"""Persistent batch: one row per request for its whole life, and the block tables of the rows.

Invariant: adding, growing or removing a request touches only its own row and never moves another; a step gathers the
rows (`quire.worker.inputs`). Columns from `num_tokens` on (drafts, samples after rejected drafts) are meaningless and
are overwritten. Large arrays are zero pages of the kernel until a row is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.kv_cache.spec import NULL_BLOCK_ID, KVCacheSpec, RecurrentStateSpec
from quire.scheduler.output import BranchedRow, NewRequestData, ScheduledRequest
from quire.worker.media_rows import MediaBatch


class AdaptedRows(Protocol):
    """Adapters of the rows: weights of a request beside the model's, in a slot of each layer."""

    @property
    def add_tokens(self) -> bool:
        """True once any row has had an adapter with added tokens."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Assign a row to a request, with or without an adapter."""

    def remove_request(self, row: int) -> None:
        """Free a row."""

    def num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens that the adapter of each row adds."""

    def num_added_of(self, request: NewRequestData) -> int:
        """Return the number of tokens that a request's adapter adds."""

    def slots_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the slot of each row, negative without an adapter; None if no row has one."""


class BlockTable:
    """Block table of one KV cache group: one row of block ids, as the group's kernels count them, per request.

    Invariant: `block_ids[row, :num_blocks[row]]` are valid blocks of the pool (times `parts_per_block`), or their
    kernel-sized parts. They are checked on entry, so a kernel never indexes with anything else. The null block 0 stands
    only where the spec needs no block. Blocks freed while a request runs stay in its row and are never read again.

    Args:
        max_num_rows: rows, one per running request.
        max_model_len: tokens of the longest request.
        spec: KV cache spec of the group.
        pool_size: blocks in the cache, the null block included.
        parts_per_block: factor from the pool's block ids to the layers'.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        spec: KVCacheSpec,
        pool_size: int,
        parts_per_block: int = 1,
    ) -> None:
        self.block_size = spec.kernel_block_size
        self.pool_size = pool_size
        self.has_states = isinstance(spec, RecurrentStateSpec)
        self._spec = spec
        self._parts_per_block = parts_per_block
        self._kernel_blocks = np.arange(spec.kernel_blocks) * spec.planes
        width = spec.num_blocks(max_model_len) * spec.kernel_blocks
        self.block_ids: NDArray[np.int32] = np.zeros((max_num_rows, width), dtype=np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_num_rows, dtype=np.int64)

    def append(self, row: int, block_ids: list[int], num_computed_tokens: int) -> None:
        """Append blocks to a row whose next computed token is at `num_computed_tokens`.

        Raises:
            EngineError: a block id is not in the pool, is 0 where a block is read, or the row is full.
        """
        if not block_ids:
            return
        parts = len(self._kernel_blocks)
        start = int(self.num_blocks[row]) // parts
        end = start + len(block_ids)
        nulls = [index for index, block_id in enumerate(block_ids, start) if block_id == NULL_BLOCK_ID]
        missing = any(self._spec.needs_block(index, num_computed_tokens, end) for index in nulls)
        if min(block_ids) < 0 or max(block_ids) >= self.pool_size or missing:
            raise EngineError(
                f"block ids {block_ids} must be in [1, {self.pool_size}), or 0 where the spec needs no block"
            )
        if end * parts > self.block_ids.shape[1]:
            raise EngineError(f"a row has {end} blocks; the limit is {self.block_ids.shape[1] // parts}")
        firsts = np.array(block_ids)[:, None]
        ids = np.where(firsts == NULL_BLOCK_ID, 0, firsts * self._parts_per_block + self._kernel_blocks)
        self.block_ids[row, start * parts : end * parts] = ids.ravel()
        self.num_blocks[row] = end * parts

    def clear(self, row: int) -> None:
        self.num_blocks[row] = 0

    def capacity(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that the blocks of each row can hold."""
        return self.num_blocks.take(rows) * self.block_size

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each token: rows [T], positions [T] -> block_id * block_size + offset, [T] int64."""
        blocks = self.block_ids[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def gather(self, rows: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
        """Return a copy of some rows, wide enough for `num_tokens` tokens: [R, blocks] int32."""
        width = -(-num_tokens // self.block_size)
        gathered: NDArray[np.int32] = self.block_ids[:, :width].take(rows, axis=0)
        return gathered


class Samples(NamedTuple):
    """N samples of a step; a row with drafts has several, in adjacent columns."""

    rows: NDArray[np.int64]
    """[N]."""
    columns: NDArray[np.int64]
    """[N] column of each sampled token: all tokens before it are known, or drafts assumed to be right."""

    def part(self, part: slice) -> Samples:
        return Samples(self.rows[part], self.columns[part])


class TokenPlaces(NamedTuple):
    """Places of sampled tokens: rows, columns, and the rows' generations at that time."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    generations: NDArray[np.int64]
    num_added: int
    """Requests added to the batch so far; if equal to the batch's count, no generation has changed."""

    def at(self, indices: NDArray[np.int64]) -> TokenPlaces:
        """Return the places at some indices."""
        return TokenPlaces(
            self.rows[indices], self.columns[indices], self.generations[indices], self.num_added
        )


class InputBatch:
    """Tokens and progress of all running requests.

    A row has `max_model_len` + 1 columns; the last is for the token sampled when the context is just full. A row's
    generation counts the requests that it was given to.

    Args:
        max_num_seqs: number of rows.
        max_model_len: most tokens of a request.
        block_tables: one per KV cache group.
        media: media of the rows, if the model takes some.
        rolls_back: whether accepted drafts count as computed (`KVCacheConfig.rolls_back`).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_tables: tuple[BlockTable, ...],
        *,
        rolls_back: bool = True,
        media: MediaBatch | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_tables = block_tables
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.generations: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.second_text_starts: NDArray[np.int64] | None = None
        """[S] start of the second text of a pair, `max_model_len` for a row with one text; None: no row has had a pair.
        """
        self.device_tokens: Tensor | None = None
        """Device copy of `token_ids`, if there is one; it has all tokens before a sample in time."""
        self.adapters: AdaptedRows | None = None
        """Adapters of the rows, if adapters are served."""
        self.media = media
        self.rolls_back = rolls_back
        self._num_added = 0
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def add(self, request: NewRequestData) -> int:
        """Assign a row and return it. The caller has checked that the tokens fit (`quire.worker.model_runner`).

        Raises:
            EngineError: it has a row already, no row is free, or a block id is bad.
        """
        if request.request_id in self._row_of:
            raise EngineError(f"request {request.request_id} already has a row")
        if not self._free_rows:
            raise EngineError(f"the plan runs more than max_num_seqs ({self.max_num_seqs}) requests")
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self.generations[row] += 1
        self._num_added += 1
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self._set_second_text(row, request.second_text_start)
        self._append_blocks(row, request.block_ids, request.num_computed_tokens)
        if self.adapters is not None:
            self.adapters.add_request(row, request)
        if self.media is not None:
            self.media.add_request(row, request)
        return row

    def _set_second_text(self, row: int, second_text_start: int | None) -> None:
        if self.second_text_starts is None:
            if second_text_start is None:
                return
            self.second_text_starts = np.full(self.max_num_seqs, self.max_model_len, dtype=np.int64)
        self.second_text_starts[row] = self.max_model_len if second_text_start is None else second_text_start

    def grow(self, request: ScheduledRequest) -> None:
        """Append the blocks and the drafts that a plan has for a request.

        Raises:
            EngineError: no row, a bad block id, or a number of drafts that does not match the samples.
        """
        row = self.row(request.request_id)
        if any(request.new_block_ids):
            self._append_blocks(row, request.new_block_ids, request.start)
        drafts, first = request.draft_token_ids, int(self.num_tokens[row])
        if len(drafts) != max(request.num_samples - 1, 0) or first + len(drafts) > self.max_model_len:
            raise EngineError(
                f"request {request.request_id}: {len(drafts)} drafts after {first} tokens, "
                f"for {request.num_samples} samples and max_model_len {self.max_model_len}"
            )
        self.token_ids[row, first : first + len(drafts)] = drafts

    def branch(self, branches: Sequence[BranchedRow]) -> NDArray[np.int64]:
        """Let rows of searches continue others, all at once; return the rows.

        Raises:
            EngineError: a row is missing, two have different numbers of tokens, or a block id is bad.
        """
        rows = self.rows([one.request_id for one in branches])
        sources = self.rows([one.parent_id for one in branches])
        ends = self.num_tokens[rows]
        if (ends != self.num_tokens[sources]).any() or (ends <= self.num_prompt_tokens[rows]).any():
            raise EngineError("the plan continues rows of beams that have different numbers of tokens")
        width = int(ends.max())
        self.token_ids[rows, :width] = self.token_ids[sources, :width]
        self.token_ids[rows, ends - 1] = [one.token_id for one in branches]
        for row, one in zip(rows.tolist(), branches, strict=True):
            if one.block_ids:
                for table in self.block_tables:
                    table.clear(row)
                self._append_blocks(row, one.block_ids, int(self.num_computed_tokens[row]))
        self.generations[rows] += 1
        self._num_added += 1
        return rows

    def remove(self, request_id: str) -> int:
        """Free the request's row and return it.

        Raises:
            EngineError: it has none.
        """
        row = self.row(request_id)
        del self._row_of[request_id]
        for table in self.block_tables:
            table.clear(row)
        if self.adapters is not None:
            self.adapters.remove_request(row)
        if self.media is not None:
            self.media.remove_request(row)
        self._free_rows.append(row)
        return row

    def row(self, request_id: str) -> int:
        """Return the row of a request.

        Raises:
            EngineError: it has none.
        """
        row = self._row_of.get(request_id)
        if row is None:
            raise EngineError(f"request {request_id} has no row")
        return row

    def rows(self, request_ids: list[str]) -> NDArray[np.int64]:
        """Return the rows of requests, [R].

        Raises:
            EngineError: one has none.
        """
        found = [self._row_of.get(request_id, -1) for request_id in request_ids]
        if -1 in found:
            self.row(request_ids[found.index(-1)])
        return np.array(found, dtype=np.int64)

    def advance(
        self,
        rows: NDArray[np.int64],
        num_computed: NDArray[np.int64],
        num_new: NDArray[np.int64] | NDArray[np.bool_],
    ) -> None:
        """Record for distinct rows [R] the computed tokens and the number of new ones, whose values follow."""
        self.num_computed_tokens[rows] = num_computed
        self.num_tokens[rows] += num_new

    def places(self, samples: Samples) -> TokenPlaces:
        """Return the places where the tokens of these samples are to be written."""
        return TokenPlaces(*samples, self.generations[samples.rows], self._num_added)

    def set_tokens(self, places: TokenPlaces, token_ids: NDArray[np.int64]) -> None:
        """Write sampled tokens, except to rows that were reassigned since."""
        rows, columns, generations, num_added = places
        if num_added == self._num_added:
            self.token_ids[rows, columns] = token_ids
        else:
            same = generations == self.generations[rows]
            self.token_ids[rows[same], columns[same]] = token_ids[same]

    def keep(self, first: TokenPlaces, num_kept: NDArray[np.int64]) -> None:
        """Keep the first `num_kept` [R] tokens from some places on: the accepted drafts and one more token."""
        same = first.generations == self.generations[first.rows]
        rows = first.rows[same]
        self.num_tokens[rows] = first.columns[same] + num_kept[same]
        if self.rolls_back:
            self.num_computed_tokens[rows] += num_kept[same] - 1

    def output_indices(self, samples: Samples) -> NDArray[np.int64]:
        """Return [N] the number of generated tokens before each sample."""
        return samples.columns - self.num_prompt_tokens[samples.rows]

    def _append_blocks(self, row: int, block_ids: list[list[int]], num_computed_tokens: int) -> None:
        for table, new in zip(self.block_tables, block_ids, strict=True):
            table.append(row, new, num_computed_tokens)
