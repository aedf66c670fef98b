# SPDX-License-Identifier: Apache-2.0
"""Embedding and output rows that adapters replace or add: their few trained tokens.

Shapes: T tokens, V rows of the table, H their size, S slots, E rows that each adapter may have, N rows of logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.low_rank import LowRankStacks

Upload = Callable[[Tensor], Tensor]
"""Copies a host tensor to the device."""


class AdapterTokenRows(NamedTuple):
    """Rows [n, H] that replace those of tokens [n] int64, all different."""

    tokens: Tensor
    rows: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.tokens.nbytes + self.rows.nbytes


class AdapterEmbeddingRows:
    """Adapter rows of the input embedding; tokens V .. V + E - 1 exist in adapters only.

    Args:
        num_slots, num_rows: adapters, and the rows that each may have.
        shape: V and H.
    """

    def __init__(
        self, num_slots: int, num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_rows, (vocab_size, size) = num_rows, shape
        self._num_ids = vocab_size + num_rows
        self._rows = torch.zeros(num_slots * num_rows, size, dtype=dtype, device=device)
        self._places = torch.full((num_slots * self._num_ids,), -1, dtype=torch.int32, device=device)

    def put(self, slot: int, own: AdapterTokenRows | None, upload: Upload) -> None:
        """Set an adapter's rows, at most E, or none."""
        places = self._places[slot * self._num_ids : (slot + 1) * self._num_ids]
        places.fill_(-1)
        if own is not None:
            first, count = slot * self._num_rows, len(own.tokens)
            of_tokens = torch.arange(first, first + count, dtype=torch.int32)
            places[upload(own.tokens)] = upload(of_tokens)
            self._rows[first : first + count] = upload(own.rows)

    def replace(self, rows: Tensor, ids: Tensor, adapter_rows: Tensor) -> Tensor:
        """Replace rows [T, H] of the table for ids [T] by the adapters' own; adapter_rows [T] as in a step."""
        of_slots = ids + adapter_rows.clamp(min=0) * self._num_ids
        places = self._places.index_select(0, of_slots)
        own = ops.embedding(places.clamp(min=0).long(), self._rows).to(rows.dtype)
        has_own = (places >= 0) & (adapter_rows >= 0)
        return torch.where(has_own[:, None], own, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._rows.nbytes + self._places.nbytes

    def launch(self, row: Tensor) -> None:
        """Launch the replacement for a row, [1] int32, without an adapter (warm-up)."""
        self.replace(self._rows[:1], torch.zeros_like(row, dtype=torch.int64), row)


class AdapterOutputRows:
    """Adapter rows of the output head. Arguments as of `AdapterEmbeddingRows`."""

    def __init__(
        self, num_slots: int, num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._has_rows = [False] * num_slots
        self._is_used = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._tokens = torch.zeros(num_slots, num_rows, dtype=torch.int64, device=device)
        # The rows are A; B is an identity.
        self._stacks = LowRankStacks.empty(num_slots, (num_rows,), shape[1], num_rows, dtype, device)
        self._stacks.b[:, :num_rows] = torch.eye(num_rows, dtype=dtype, device=device)
        self._stacks.scales.fill_(1.0)

    def put(self, slot: int, own: AdapterTokenRows | None, upload: Upload) -> None:
        """Set an adapter's rows, at most E, or none."""
        size = self._tokens.shape[1]
        self._has_rows[slot] = own is not None
        self._is_used[slot] = own is not None
        self._stacks.ranks[slot] = 0 if own is None else size
        if own is not None:
            # All E places are written; surplus ones repeat the last row.
            filled = torch.arange(size).clamp(max=len(own.tokens) - 1)
            self._tokens[slot] = upload(own.tokens[filled])
            self._stacks.a[slot, 0, :, :size] = upload(own.rows[filled].t().contiguous())

    def replace(self, logits: Tensor, hidden: Tensor, adapter_rows: Tensor, bias: Tensor | None) -> None:
        """Write the logits of adapters' rows for hidden [N, H] into float32 logits [N, V or more]; adapter_rows [N].

        The logits have columns for all tokens of the adapters.
        """
        if not any(self._has_rows):
            return
        slots = adapter_rows.clamp(min=0).long()
        has_own = ((adapter_rows >= 0) & self._is_used[slots])[:, None]
        # Rows without trained tokens write back the logit of token 0, which always exists.
        tokens = self._tokens[slots].masked_fill(~has_own, 0)
        own = logits.new_zeros(tokens.shape)
        ops.low_rank_linear(own, hidden, adapter_rows, self._stacks)
        if bias is not None:
            own += bias[tokens.clamp(max=len(bias) - 1)].masked_fill(tokens >= len(bias), 0.0)
        logits.scatter_(1, tokens, torch.where(has_own, own, logits.gather(1, tokens)))

    def launch(self, row: Tensor) -> None:
        """Launch the logits of a row, [1] int32, without an adapter (warm-up)."""
        own, hidden = (
            row.new_zeros(1, size, dtype=torch.float32)
            for size in (self._tokens.shape[1], self._stacks.a.shape[2])
        )
        ops.low_rank_linear(own, hidden, row, self._stacks)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._tokens.nbytes + self._stacks.nbytes
