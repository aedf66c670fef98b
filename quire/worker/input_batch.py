"""The persistent batch: one row per request for its whole life.

Invariant: adding, growing or removing a request touches its own row only, and never moves another; a step
reads rows by gathering them (`quire.worker.inputs`). Big arrays are zero pages of the kernel until a row is
really used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.scheduler.output import CachedRequestData, NewRequestData
from quire.worker.block_table import BlockTable


class InputBatch:
    """Tokens and progress of all running requests.

    A row has one column more than `max_model_len`, for the token sampled when the context is just full.

    Args:
        max_num_seqs: number of rows.
        max_model_len: most tokens of a request.
        block_tables: one per KV cache group.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_tables: tuple[BlockTable, ...]) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_tables = block_tables
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
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
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self._append_blocks(row, request.block_ids, request.num_computed_tokens)
        return row

    def update(self, request: CachedRequestData) -> None:
        """Take over what the plan says has changed for a request that has a row."""
        row = self.row(request.request_id)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self._append_blocks(row, request.new_block_ids, request.num_computed_tokens)

    def remove(self, request_id: str) -> int:
        """Free the request's row and return it.

        Raises:
            EngineError: it has none.
        """
        row = self.row(request_id)
        del self._row_of[request_id]
        for table in self.block_tables:
            table.clear(row)
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

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Add one token at the end of each of some rows, all different."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def num_output_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens generated so far, [R]: also the output index of the token each row samples next."""
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]

    def _append_blocks(self, row: int, block_ids: list[list[int]], num_computed_tokens: int) -> None:
        for table, new in zip(self.block_tables, block_ids, strict=True):
            table.append(row, new, num_computed_tokens)
