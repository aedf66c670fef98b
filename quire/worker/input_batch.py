"""The persistent batch: one row per request for its whole life.

Invariant: adding, growing or removing a request touches its own row only, and never moves another; a step
reads rows by gathering them (`quire.worker.inputs`). What stands behind a row's `num_tokens` tokens, drafts and what
was sampled behind wrong ones, means nothing and is written over. Big arrays are zero pages of the kernel until a row
is really used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.scheduler.output import NewRequestData, ScheduledRequest
from quire.worker.block_table import BlockTable
from quire.worker.row_adapters import RowAdapters


class Samples(NamedTuple):
    """The N samples of a step, or some of them: a row may have several, whose columns follow each other."""

    rows: NDArray[np.int64]
    """[N]."""
    columns: NDArray[np.int64]
    """[N] where the sampled token is to stand: all before it in the row are known, or drafts taken to be right."""

    def part(self, part: slice) -> Samples:
        return Samples(self.rows[part], self.columns[part])


class TokenPlaces(NamedTuple):
    """Where sampled tokens stand: their rows, their columns, and the generations that the rows had."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    generations: NDArray[np.int64]
    num_added: int
    """Requests that had been added to the batch; while there are no more, no generation has changed."""

    def at(self, indices: NDArray[np.int64]) -> TokenPlaces:
        """Some of them."""
        return TokenPlaces(
            self.rows[indices], self.columns[indices], self.generations[indices], self.num_added
        )


class InputBatch:
    """Tokens and progress of all running requests.

    A row has one column more than `max_model_len`, for the token sampled when the context is just full. Its generation
    is the number of requests that it has been given to.

    Args:
        max_num_seqs: number of rows.
        max_model_len: most tokens of a request.
        block_tables: one per KV cache group.
        adapters: those of the rows, where adapters are served.
        rolls_back: whether accepted drafts count as computed (`KVCacheConfig.rolls_back`).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_tables: tuple[BlockTable, ...],
        *,
        rolls_back: bool = True,
        adapters: RowAdapters | None = None,
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
        """[S] where the second of a row's two texts begins, `max_model_len` where it has one; None: no row had two."""
        self.device_tokens: Tensor | None = None
        """`token_ids` as a device keeps them, if one does: whatever stands before a sample is there in time."""
        self.adapters = adapters
        self.rolls_back = rolls_back
        self._num_added = 0
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def add(self, request: NewRequestData) -> int:
        """Give the request a row and return it. Its tokens are known to fit (`quire.worker.validation`).

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
        self._tell_texts_apart(row, request.second_text_start)
        self._append_blocks(row, request.block_ids, request.num_computed_tokens)
        if self.adapters is not None:
            self.adapters.add_request(row, request.lora_request)
        return row

    def _tell_texts_apart(self, row: int, second_text_start: int | None) -> None:
        if self.second_text_starts is None:
            if second_text_start is None:
                return
            self.second_text_starts = np.full(self.max_num_seqs, self.max_model_len, dtype=np.int64)
        self.second_text_starts[row] = self.max_model_len if second_text_start is None else second_text_start

    def grow(self, request: ScheduledRequest) -> None:
        """Take over the blocks and the drafts that a plan brings for a request.

        Raises:
            EngineError: it has no row, a block id is bad, or the drafts are not what is to be sampled.
        """
        row = self.row(request.request_id)
        if any(request.new_block_ids):
            self._append_blocks(row, request.new_block_ids, request.start)
        drafts, first = request.draft_token_ids, int(self.num_tokens[row])
        if len(drafts) != max(request.num_samples - 1, 0) or first + len(drafts) > self.max_model_len:
            raise EngineError(
                f"request {request.request_id}: {len(drafts)} drafts behind {first} tokens, "
                f"for {request.num_samples} samples in a context of {self.max_model_len}"
            )
        self.token_ids[row, first : first + len(drafts)] = drafts

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
        self._free_rows.append(row)
        return row

    def row(self, request_id: str) -> int:
        """The row of a request.

        Raises:
            EngineError: it has none.
        """
        row = self._row_of.get(request_id)
        if row is None:
            raise EngineError(f"request {request_id} has no row")
        return row

    def rows(self, request_ids: list[str]) -> NDArray[np.int64]:
        """The rows of requests, [R].

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
        """Some rows [R], all different, have computed so many tokens and have so many new ones, set later."""
        self.num_computed_tokens[rows] = num_computed
        self.num_tokens[rows] += num_new

    def places(self, samples: Samples) -> TokenPlaces:
        """Where the tokens of these samples are to be set."""
        return TokenPlaces(*samples, self.generations[samples.rows], self._num_added)

    def set_tokens(self, places: TokenPlaces, token_ids: NDArray[np.int64]) -> None:
        """Set what was sampled, but in rows that others have been given since."""
        rows, columns, generations, num_added = places
        if num_added == self._num_added:
            self.token_ids[rows, columns] = token_ids
        else:
            same = generations == self.generations[rows]
            self.token_ids[rows[same], columns[same]] = token_ids[same]

    def keep(self, first: TokenPlaces, num_kept: NDArray[np.int64]) -> None:
        """Of the tokens set from some places [R] on, the first count: accepted drafts, and the one behind them."""
        same = first.generations == self.generations[first.rows]
        rows = first.rows[same]
        self.num_tokens[rows] = first.columns[same] + num_kept[same]
        if self.rolls_back:
            self.num_computed_tokens[rows] += num_kept[same] - 1

    def output_indices(self, samples: Samples) -> NDArray[np.int64]:
        """[N] how many generated tokens stand before each sample."""
        return samples.columns - self.num_prompt_tokens[samples.rows]

    def _append_blocks(self, row: int, block_ids: list[list[int]], num_computed_tokens: int) -> None:
        for table, new in zip(self.block_tables, block_ids, strict=True):
            table.append(row, new, num_computed_tokens)
