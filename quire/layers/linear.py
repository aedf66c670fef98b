"""Linear layers, alone or several merged into one so that a step makes fewer and larger kernel calls.

Shapes: T tokens, K input features, N output features, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import QuantizedRows
from quire.layers.activation import FUSED, GATED, GATED_FP8
from quire.layers.base import RowSource
from quire.layers.matrix import MatrixLayer, Piece
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Cut, Shard, Span
from quire.layers.slot import length
from quire.layers.step import StepContext


class Linear(MatrixLayer):
    """`x @ weight.T + bias`, weight [N, K].

    `cut` says how several ranks may share it. `spans` has the output rows of each part if this layer stands for
    several of the checkpoint's. `transposed` says that the checkpoint stores [K, N], as GPT-2's Conv1D does.
    """

    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        name: str = "",
        cut: Cut = "whole",
        spans: Sequence[Span] = (),
        transposed: bool = False,
    ) -> None:
        spans = spans or (Span(out_features),)
        assert sum(span.size for span in spans) == out_features
        super().__init__(spans, in_features, dtype, name=name, cut=cut, bias=bias, transposed=transposed)
        self._quantize_x: Callable[[], None] | None = None

    def reads(self, source: RowSource) -> None:
        """Say that x is what `source` makes, and that nobody else reads it.

        If the weight is kept in fp8, x comes quantised then, and the product needs no pass over it before.
        """
        self._quantize_x = source.quantize_rows

    def forward(self, x: Tensor | QuantizedRows, step: StepContext) -> Tensor:
        """x [T, K] -> [T, N]; the rows are those of the step's tokens."""
        if self.packed is not None:
            return ops.packed_linear(x, self.packed, self.bias)
        assert self.weight is not None
        assert isinstance(x, Tensor), "only a packed weight has its x quantised"
        return ops.linear(x, self.weight, self.bias)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self._quantize_x is not None and self.packed is not None and self.method.quantizes_rows:
            self._quantize_x()


class QKVLinear(Linear):
    """Query, key and value projections as one, cut by heads; ranks beyond the key-value heads share them.

    A checkpoint that is `grouped` has, in one tensor, the query heads of the first key-value head, its key, its value,
    then those of the next; or it has the queries apart, and the rest so. What comes out is bounded by `clip`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        name: str = "",
        transposed: bool = False,
        grouped: bool = False,
        clip: float | None = None,
    ) -> None:
        self.grouped = grouped
        self.clip = clip
        kv_heads = Span(num_kv_heads, head_dim, replicated=True)
        super().__init__(
            in_features=hidden_size,
            out_features=(num_heads + 2 * num_kv_heads) * head_dim,
            bias=bias,
            dtype=dtype,
            name=name,
            cut="output",
            spans=(Span(num_heads, head_dim), kv_heads, kv_heads),
            transposed=transposed,
        )
        self.head_dim = head_dim

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        q, k, v = (length(rows) // span.unit for rows, span in zip(self.rows, self.spans, strict=True))
        self.head_counts = (q, k, v)

    def heads(self, x: Tensor | QuantizedRows, step: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, K] -> views q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] of one [T, N]."""
        rows = self(x, step)
        if self.clip is not None:
            rows = rows.clamp(-self.clip, self.clip)
        heads = rows.view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split_with_sizes(heads, self.head_counts, 1)
        return q, k, v

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        if not self.grouped:
            return super().pieces(names)
        if len(names) == 1:
            return self._by_heads(names[0], self.spans, self.rows, 0)
        query, together = names
        size, rows = self.spans[0].size, self.rows[0]
        own = Piece(query, size, slice(0, size), rows, slice(0, length(rows)))
        return [own, *self._by_heads(together, self.spans[1:], self.rows[1:], length(rows))]

    def _by_heads(
        self, name: str, spans: Sequence[Span], all_rows: Sequence[slice], start: int
    ) -> list[Piece]:
        """Of a module that has what belongs to a key-value head together; here, spans stand from `start` on."""
        pieces, first = [], 0
        num_kv_heads, total = self.spans[1].units, sum(span.size for span in spans)
        for head in range(num_kv_heads):
            place = start
            for span, rows in zip(spans, all_rows, strict=True):
                size = span.size // num_kv_heads
                begin, stop = max(head * size, rows.start), min((head + 1) * size, rows.stop)
                # Of a head that is another rank's, an empty range.
                begin, stop = (begin, stop) if begin < stop else (rows.start, rows.start)
                ours = slice(place + begin - rows.start, place + stop - rows.start)
                taken = first + begin - head * size if stop > begin else first
                region = slice(first, first + size)
                pieces.append(Piece(name, total, region, slice(taken, taken + stop - begin), ours))
                first, place = first + size, place + length(rows)
        return pieces


class GateUpLinear(Linear):
    """The gate and up projections of a gated MLP as one: `act(gate(x)) * up(x)`, [T, K] -> [T, I]; cut by output."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        dtype: torch.dtype,
        activation: str,
        name: str = "",
        transposed: bool = False,
    ) -> None:
        super().__init__(
            in_features=hidden_size,
            out_features=2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            name=name,
            cut="output",
            spans=(Span(intermediate_size), Span(intermediate_size)),
            transposed=transposed,
        )
        self.activation = activation
        self._gate: Callable[[Tensor], Tensor | QuantizedRows] = GATED[activation]
        self._fused = FUSED.get(activation)

    def forward(self, x: Tensor | QuantizedRows, step: StepContext) -> Any:
        if self.packed is None or self._fused is None:
            return self._gate(super().forward(x, step))
        return ops.packed_linear(x, self.packed, self.bias, self._fused)

    def quantize_rows(self) -> None:
        self._gate, self._fused = GATED_FP8[self.activation], None

    def halves(self) -> int:
        return 2 if self.activation in FUSED else 1
