"""Linear layers, alone or several merged into one so that a step makes fewer and larger kernel calls.

Shapes: T tokens, K input features, N output features, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels import ops
from quire.layers.base import Layer, Slot, parameter


class Linear(Layer):
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
        super().__init__()
        assert not merged or sum(merged) == out_features
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.merged = tuple(merged)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return ops.linear(x, self.weight, self.bias)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, rows in zip(names, self._rows(len(names)), strict=True):
            weight = self.weight[rows]
            yield f"{name}.weight", Slot(weight.t() if self.transposed else weight, "normal")
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

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, K] -> views q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] of one [T, N]."""
        parts = self(x).split(self.merged, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v


class GateUpLinear(Linear):
    """The gate and up projections of a gated MLP as one: [T, K] -> [T, 2 * I], gate first."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(
            in_features=hidden_size,
            out_features=2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            merged=(intermediate_size, intermediate_size),
        )
