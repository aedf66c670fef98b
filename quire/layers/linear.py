# SPDX-License-Identifier: Apache-2.0
"""Linear layers, alone or merged (QKV, gate and up) so that a step makes fewer and larger kernel calls.

Shapes: T tokens, K input features, N output features, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import Function, FusedActivation, QuantizedRows, RowQuantization
from quire.kernels.low_rank import LowRankStacks, SharedStacks
from quire.layers.activation import FUSED, GATED, GATED_FP8
from quire.layers.base import RowSource
from quire.layers.matrix import MatrixLayer, ModuleRows
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Partition, Shard, ShardSpan, StackMember
from quire.layers.slot import Slot, length
from quire.layers.step import StepContext
from quire.layers.turns import LayerTurns


class Linear(MatrixLayer):
    """`activation(x @ weight.T + bias)`, weight [N, K].

    `partition` is the tensor-parallel one. `spans` has the output rows of each part if the layer merges several of the
    checkpoint's, and `groups` how these are stored; see `MatrixLayer`. `transposed`: the checkpoint stores [K, N], as
    GPT-2's Conv1D does.
    """

    makes_products = quantizes_inputs = True
    takes_adapters = True
    """True if all its matmuls happen here, with the step at hand, so that adapters can add to them."""

    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        name: str = "",
        partition: Partition = "whole",
        spans: Sequence[ShardSpan] = (),
        transposed: bool = False,
        groups: int = 1,
        member: StackMember | None = None,
        activation: Function | None = None,
    ) -> None:
        spans = spans or (ShardSpan(out_features),)
        assert sum(span.size for span in spans) == out_features
        assert activation is None or partition != "input", (
            "a row-parallel layer is activated after its all-reduce"
        )
        super().__init__(
            spans,
            in_features,
            dtype,
            name=name,
            partition=partition,
            bias=bias,
            transposed=transposed,
            groups=groups,
            member=member,
        )
        self._function = activation
        self._ending: FusedActivation | None = activation
        # In a tuple, so that nn.Module does not register it as a submodule.
        self._source: tuple[RowSource, ...] = ()
        self.adapters: LowRankStacks | None = None
        """Adapter stacks that a step's `adapter_rows` index; None: the engine serves no adapters."""
        self.shared_adapters: SharedStacks | None = None
        """Adapter slots of all experts with such a layer, through which adapters add to their matmuls."""
        self.expert = 0
        """Expert number of this layer."""
        self.turns: LayerTurns | None = None
        """Layers that take turns at it; None: it belongs to one layer."""

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self._adds_up_with = self.group if self.partition == "input" else None

    def reads(self, source: RowSource) -> None:
        """Declare that x is the output of `source` and that no other layer reads it.

        If the weight is fp8, x then arrives quantized, and the matmul needs no quantization pass.
        """
        self._source = (source,)

    @property
    def source(self) -> RowSource | None:
        """Layer whose output is read by this layer alone, if declared."""
        return self._source[0] if self._source else None

    def forward(self, x: Tensor | QuantizedRows, step: StepContext) -> Tensor:
        """x [T, K] -> [T, N]; one row per token of the step. K is the rank's share if the layer is row-parallel."""
        adapts = self.adapters is not None and step.adapter_rows is not None
        if self._ending is None or self.packed is None or adapts or self.input_quantization is not None:
            return self._activated(self.sums(x, step))
        return ops.packed_linear(self._in_order(x), self.packed, self.bias, self._ending)

    def sums(self, x: Tensor | QuantizedRows, step: StepContext) -> Tensor:
        """Return the pre-activation: [T, K] -> [T, N]."""
        if self.input_quantization is None:
            out = self._product(x)
        else:
            assert isinstance(x, Tensor), "activation quantization from the checkpoint takes unquantized x"
            out = self.input_quantization.product(x, self._product)
        if self.adapters is not None and step.adapter_rows is not None:
            assert isinstance(x, Tensor), "a layer with adapters takes unquantized x"
            ops.low_rank_linear(out, x, step.adapter_rows, self.adapters)
        return out if self._adds_up_with is None else ops.all_reduce(out, self._adds_up_with)

    def _activated(self, sums: Tensor) -> Any:
        return sums if self._function is None else ops.activate(sums, self._function)

    def _product(self, x: Tensor | QuantizedRows, way: RowQuantization | None = None) -> Tensor:
        if way is not None:
            assert isinstance(x, Tensor), "activation quantization from the checkpoint takes unquantized x"
            if self.packed is not None and self.input_order is None:
                return ops.rounded_linear(x, self.packed, way, self.bias)
            x = ops.round_rows(x, way)
        if self.packed is not None:
            return ops.packed_linear(self._in_order(x), self.packed, self.bias)
        assert self.weight is not None
        assert isinstance(x, Tensor), "only a packed weight takes quantized x"
        return ops.linear(x, self.weight, self.bias)

    def _in_order(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """Return x with its columns in the packed weight's order."""
        if self.input_order is None:
            return x
        assert isinstance(x, Tensor), "fp8 rows meet an fp8 weight, which is never permuted"
        return x.index_select(-1, self.input_order)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.source is not None and self.packed is not None and self.method.quantizes_rows:
            self.source.quantize_rows()


class ExactLinear(Linear):
    """Small linear layer that is never quantized, because much depends on its output (routers)."""

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method.unrounded(), shard)


class QKVLinear(Linear):
    """Merged query, key and value projections, sharded by heads; ranks beyond the key-value heads share them.

    `grouped`: the checkpoint stores in one tensor the query heads of the first key-value head, its key, its value, then
    those of the next; or it has the queries apart, and the rest so. `gated`: each query head has a gate, stored after
    its query. `clip` bounds the outputs. `paired`: each head of the first half belongs to one of the second, and ranks
    hold pairs. With several `blocks` the checkpoint has, in one tensor, that fraction of the queries, the values and
    the keys, then the next of each. `merged`: the outputs are read as one tensor [T, N]. Without `values` there are
    queries and keys.
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
        gated: bool = False,
        clip: float | None = None,
        paired: bool = False,
        blocks: int = 1,
        merged: bool = False,
        values: bool = True,
    ) -> None:
        assert not (paired and (grouped or gated or blocks > 1)), "paired heads are stored in plain halves"
        self.clip, self.head_dim, self.parts = clip, head_dim, 2 if paired else 1
        self.blocks = blocks
        self._values_apart = values and not (gated or merged)
        heads = ShardSpan(num_heads // self.parts, head_dim)
        kv_heads = ShardSpan(num_kv_heads // self.parts, head_dim, replicated=True)
        whole = (heads, kv_heads, kv_heads, heads) if gated else (heads, kv_heads, kv_heads)
        spans = tuple(span for span in (whole if values else whole[:2]) for _ in range(self.parts))
        super().__init__(
            in_features=hidden_size,
            out_features=sum(span.size for span in spans),
            bias=bias,
            dtype=dtype,
            name=name,
            partition="output",
            spans=spans,
            transposed=transposed,
            groups=num_heads if gated else num_kv_heads if grouped else blocks,
        )

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.head_counts = tuple(
            sum(map(length, self.rows[first : first + self.parts])) // self.head_dim
            for first in range(0, len(self.rows), self.parts)
        )

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        if self.blocks > 1:
            return list(self.pieces_of(names[0], (0, 2, 1)))
        if len(names) == 1:
            return super().pieces(names)
        return super().pieces([name for name in names for _ in range(self.parts)])

    @property
    def num_value_rows(self) -> int:
        return self.head_counts[-1] * self.head_dim if self._values_apart else 0

    def heads(self, x: Tensor | QuantizedRows, step: StepContext) -> Sequence[Tensor]:
        """x [T, K] -> views q [T, Hq, D], k and v [T, Hkv, D], and if `gated` gates [T, Hq, D]."""
        if self.packed_values is None or self.adapters is not None:
            return self._split(self(x, step), self.head_counts)
        rows, values = self._apart(x)
        return (*self._split(rows, self.head_counts[:-1]), *self._split(values, self.head_counts[-1:]))

    def _split(self, rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
        if self.clip is not None:
            rows = rows.clamp(-self.clip, self.clip)
        return torch.split_with_sizes(rows.view(rows.shape[0], -1, self.head_dim), counts, 1)

    def _apart(self, x: Tensor | QuantizedRows) -> tuple[Tensor, ...]:
        """Return queries with keys, and values, of a layer that has packed them apart."""
        matrices = [matrix for matrix in (self.packed, self.packed_values) if matrix is not None]
        sizes = [matrix.outputs for matrix in matrices]
        biases = (None, None) if self.bias is None else torch.split_with_sizes(self.bias, sizes)
        return tuple(
            ops.packed_linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)
        )

    def _product(self, x: Tensor | QuantizedRows, way: RowQuantization | None = None) -> Tensor:
        return super()._product(x, way) if self.packed_values is None else torch.cat(self._apart(x), 1)


class UnbiasedKeyQKVLinear(QKVLinear):
    """Merged projections whose checkpoint has biases of queries and values only, as Whisper's."""

    def _bias_slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        keys = f"{names[1]}.bias"
        return ((name, slot) for name, slot in super()._bias_slots(names) if name != keys)

    def finish_loading(self) -> None:
        if self.bias is not None:
            first = self.head_counts[0] * self.head_dim
            self.bias.data[first : first + self.head_counts[1] * self.head_dim] = 0
        super().finish_loading()


class GateUpLinear(Linear):
    """Merged gate and up projections of a gated MLP: `act(gate(x)) * up(x)`, [T, K] -> [T, I].

    With `prepare` it is `act(prepare(gate(x))) * up(x)`. `up_first`: a merged checkpoint tensor has the rows of up
    before those of gate.
    """

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
        partition: Partition = "output",
        prepare: Callable[[Tensor], Tensor] | None = None,
        up_first: bool = False,
        member: StackMember | None = None,
    ) -> None:
        self.up_first = up_first
        super().__init__(
            in_features=hidden_size,
            out_features=2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            name=name,
            partition=partition,
            spans=(ShardSpan(intermediate_size), ShardSpan(intermediate_size)),
            transposed=transposed,
            member=member,
        )
        self.activation = activation
        self._gate: Callable[[Tensor], Tensor | QuantizedRows] = GATED[activation]
        self._prepare = prepare
        self._ending = FUSED.get(activation) if prepare is None else None

    def _activated(self, sums: Tensor) -> Any:
        if self._prepare is None:
            return self._gate(sums)
        gate, up = sums.chunk(2, dim=1)
        return self._gate(torch.cat((self._prepare(gate), up), dim=1))

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        if self.up_first and len(names) == 1:
            return list(self.pieces_of(names[0], (1, 0)))
        return super().pieces(names)

    def quantize_rows(self) -> None:
        self._gate, self._ending = GATED_FP8[self.activation], None

    def halves(self) -> int:
        return 2 if self.activation in FUSED else 1
