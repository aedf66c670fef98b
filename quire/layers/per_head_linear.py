# SPDX-License-Identifier: Apache-2.0
"""Linear layer with a weight of its own for each head.

T tokens of the step, H heads, K and N input and output features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import PackedWeight
from quire.layers.embedding import HeadAdapters
from quire.layers.matrix import MatrixLayer, ModuleRows
from quire.layers.shard import ShardSpan
from quire.layers.slot import length
from quire.layers.step import StepContext


class PerHeadLinear(MatrixLayer):
    """`x[:, h] @ weight[h].T` for each head h, weight [H, N, K] kept as [H * N, K]; sharded by heads.

    A head of the checkpoint's weight has `before` other rows, its own, and `after` other rows. Its own are [N, K], or
    [K, N] if `inverted`: the checkpoint multiplies this layer's output and not its input.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        name: str,
        before: int = 0,
        after: int = 0,
        inverted: bool = False,
    ) -> None:
        self.before, self.after, self.inverted = before, after, inverted
        stored_rows, stored_columns = (in_features, out_features) if inverted else (out_features, in_features)
        super().__init__(
            [ShardSpan(num_heads, stored_rows)], stored_columns, dtype, name=name, partition="output"
        )
        self._matrix: PackedWeight | None = None
        self.adapters: HeadAdapters | None = None
        """None: the engine serves no adapters."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H, K], strides allowed, for the rank's heads and the step's tokens -> [T, H, N]."""
        if self._matrix is None:
            self._matrix = self.matrix()
        if self.adapters is None or step.adapter_rows is None:
            return ops.per_head_linear(x, self._matrix)
        x = self.adapters.scaled(x, step.adapter_rows)
        out = ops.per_head_linear(x, self._matrix)
        self.adapters.add(out, x, step.adapter_rows)
        return out

    @property
    def num_heads(self) -> int:
        """Number of the rank's heads."""
        return self.num_rows // self.spans[0].unit

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        (rows,), (span,) = self.rows, self.spans
        pieces = []
        stride = self.before + span.unit + self.after
        for head in range(span.units):
            own = slice(head * stride + self.before, head * stride + self.before + span.unit)
            at = head * span.unit - rows.start
            taken = 0 <= at < length(rows)
            pieces.append(
                ModuleRows(
                    names[0],
                    span.units * stride,
                    own,
                    own if taken else slice(own.start, own.start),
                    slice(at, at + span.unit) if taken else slice(0, 0),
                )
            )
        return pieces

    def matrix_shape(self) -> tuple[int, int]:
        rows, columns = super().matrix_shape()
        if not self.inverted:
            return rows, columns
        unit = self.spans[0].unit
        return rows // unit * columns, unit

    @property
    def rearranges(self) -> bool:
        return self.inverted

    def rearranged(self, weight: Tensor) -> Tensor:
        if not self.inverted:
            return weight
        heads = torch.unflatten(weight, 0, (-1, self.spans[0].unit))
        return heads.transpose(1, 2).flatten(0, 1).contiguous()
