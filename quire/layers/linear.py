"""Linear layers, alone or several merged into one so that a step makes fewer and larger kernel calls.

Shapes: T tokens, K input features, N output features, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import ops
from quire.kernels.linear import QuantizedRows, WeightScheme
from quire.layers.activation import GATED, GATED_FP8
from quire.layers.base import RowSource, Slot, parameter
from quire.layers.matrix import MatrixLayer
from quire.layers.step import StepContext


class Linear(MatrixLayer):
    """`x @ weight.T + bias`, weight [N, K].

    `merged` has the output rows of each part if this layer stands for several of the checkpoint's. `transposed` says
    that the checkpoint stores [K, N], as GPT-2's Conv1D does.
    """

    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        merged: Sequence[int] = (),
        transposed: bool = False,
    ) -> None:
        super().__init__(out_features, in_features, dtype)
        assert not merged or sum(merged) == out_features
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.merged = tuple(merged)
        self.transposed = transposed
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

    def finish_loading(self, scheme: WeightScheme) -> None:
        self.pack(scheme)
        if self._quantize_x is not None and self.packed is not None and self.packed.scheme.kind == "fp8":
            self._quantize_x()
        if self.bias is not None and self.packed is not None:
            self.bias = nn.Parameter(self.bias.float(), requires_grad=False)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        assert self.weight is not None, "slots are filled before the layer is finished"
        adopt = self.adopter() if len(names) == 1 and not self.transposed else None
        for name, rows in zip(names, self._rows(len(names)), strict=True):
            weight = self.weight[rows]
            yield f"{name}.weight", Slot(weight.t() if self.transposed else weight, "normal", adopt=adopt)
            if self.bias is not None:
                yield f"{name}.bias", Slot(self.bias[rows], "zeros")

    def _rows(self, num_parts: int) -> list[slice]:
        if num_parts == 1:
            return [slice(None)]
        ends = list(accumulate(self.merged))
        return [slice(end - size, end) for end, size in zip(ends, self.merged, strict=True)]


class QKVLinear(Linear):
    """Query, key and value projections as one."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> None:
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        super().__init__(
            in_features=hidden_size,
            out_features=sum(sizes),
            bias=bias,
            dtype=dtype,
            merged=sizes,
            transposed=transposed,
        )
        self.head_dim = head_dim
        self.head_counts = (num_heads, num_kv_heads, num_kv_heads)

    def heads(self, x: Tensor | QuantizedRows, step: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, K] -> views q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] of one [T, N]."""
        heads = self(x, step).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split_with_sizes(heads, self.head_counts, 1)
        return q, k, v


class GateUpLinear(Linear):
    """The gate and up projections of a gated MLP as one: `act(gate(x)) * up(x)`, [T, K] -> [T, I]."""

    def __init__(
        self, *, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype, activation: str
    ) -> None:
        super().__init__(
            in_features=hidden_size,
            out_features=2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            merged=(intermediate_size, intermediate_size),
        )
        self.activation = activation
        self._gate: Callable[[Tensor], Tensor | QuantizedRows] = GATED[activation]

    def forward(self, x: Tensor | QuantizedRows, step: StepContext) -> Any:
        if self.packed is None or self._gate is not ops.silu_and_mul:
            return self._gate(super().forward(x, step))
        return ops.packed_linear(x, self.packed, self.bias, "silu_and_mul")

    def quantize_rows(self) -> None:
        self._gate = GATED_FP8[self.activation]

    def halves(self) -> int:
        return 2 if self.activation == "silu" else 1
