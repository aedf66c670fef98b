"""Linear layers, alone or several merged into one so that a step makes fewer and larger kernel calls.

Shapes: T tokens, K input features, N output features, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import Ending, Function, QuantizedRows
from quire.kernels.lora import LoraStacks, SharedStacks
from quire.kernels.rounding import RowRounding
from quire.layers.activation import FUSED, GATED, GATED_FP8
from quire.layers.base import RowSource
from quire.layers.matrix import MatrixLayer, Piece
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Cut, Member, Shard, Span
from quire.layers.slot import length
from quire.layers.step import StepContext


@dataclass(frozen=True)
class Turns:
    """The layers of a model that take turns at one layer of ours, as if each had it; adapters know them apart.

    A step of one of them has adapter rows that are counted from its slots on.
    """

    layers: tuple[int, ...]
    """Their numbers; the checkpoint has the layer at `home`."""
    home: int
    idle: tuple[int, ...] = ()
    """Those at which the model has it, too, and that never ask it."""
    slots: SharedStacks = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", SharedStacks(range(len(self.layers))))

    def name_at(self, layer: int, name: str) -> str:
        """What the layer is called there."""
        return name.replace(f".layers.{self.home}.", f".layers.{layer}.", 1)


class Linear(MatrixLayer):
    """`x @ weight.T + bias`, weight [N, K], and what `activation` makes of each element.

    `cut` says how several ranks may share it. `spans` has the output rows of each part if this layer stands for
    several of the checkpoint's, and `groups` how these are stored; see `MatrixLayer`. `transposed` says that the
    checkpoint stores [K, N], as GPT-2's Conv1D does.
    """

    makes_products = rounds_inputs = True
    takes_adapters = True
    """Whether all products of its matrix are made here, with the step at hand, so that adapters can add to them."""

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
        groups: int = 1,
        member: Member | None = None,
        activation: Function | None = None,
    ) -> None:
        spans = spans or (Span(out_features),)
        assert sum(span.size for span in spans) == out_features
        assert activation is None or cut != "input", "what ranks have parts of is activated behind their sum"
        super().__init__(
            spans,
            in_features,
            dtype,
            name=name,
            cut=cut,
            bias=bias,
            transposed=transposed,
            groups=groups,
            member=member,
        )
        self._function = activation
        self._ending: Ending | None = activation
        # In a tuple, for it is no part of this layer.
        self._source: tuple[RowSource, ...] = ()
        self.adapters: LoraStacks | None = None
        """What a step's `adapter_rows` choose from; None: the engine serves no adapters."""
        self.shared_adapters: SharedStacks | None = None
        """Where the slots of all experts are that have such a layer, which is how adapters add to their products."""
        self.expert = 0
        """Of which of them it is."""
        self.turns: Turns | None = None
        """Who takes turns at it; None: it is one layer's."""

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self._adds_up_with = self.group if self.cut == "input" else None

    def reads(self, source: RowSource) -> None:
        """Say that x is what `source` makes, and that nobody else reads it.

        If the weight is kept in fp8, x comes quantised then, and the product needs no pass over it before.
        """
        self._source = (source,)

    @property
    def source(self) -> RowSource | None:
        """What makes x for this layer alone, if it was said."""
        return self._source[0] if self._source else None

    def forward(self, x: Tensor | QuantizedRows, step: StepContext) -> Tensor:
        """x [T, K] -> [T, N]; the rows are those of the step's tokens. K is the rank's share if that is cut, else N."""
        adapts = self.adapters is not None and step.adapter_rows is not None
        if self._ending is None or self.packed is None or adapts or self.rounded_inputs is not None:
            return self._activated(self.sums(x, step))
        return ops.packed_linear(self._in_order(x), self.packed, self.bias, self._ending)

    def sums(self, x: Tensor | QuantizedRows, step: StepContext) -> Tensor:
        """What `forward` activates: [T, K] -> [T, N]."""
        if self.rounded_inputs is None:
            out = self._product(x)
        else:
            assert isinstance(x, Tensor), "what is rounded as a checkpoint says comes as it is"
            out = self.rounded_inputs.product(x, self._product)
        if self.adapters is not None and step.adapter_rows is not None:
            assert isinstance(x, Tensor), "what serves adapters does not quantise x"
            ops.lora_linear(out, x, step.adapter_rows, self.adapters)
        return out if self._adds_up_with is None else ops.all_reduce(out, self._adds_up_with)

    def _activated(self, sums: Tensor) -> Any:
        return sums if self._function is None else ops.activate(sums, self._function)

    def _product(self, x: Tensor | QuantizedRows, way: RowRounding | None = None) -> Tensor:
        if way is not None:
            assert isinstance(x, Tensor), "what is rounded as a checkpoint says comes as it is"
            if self.packed is not None and self.input_order is None:
                return ops.rounded_linear(x, self.packed, way, self.bias)
            x = ops.round_rows(x, way)
        if self.packed is not None:
            return ops.packed_linear(self._in_order(x), self.packed, self.bias)
        assert self.weight is not None
        assert isinstance(x, Tensor), "only a packed weight has its x quantised"
        return ops.linear(x, self.weight, self.bias)

    def _in_order(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """x, its columns as the packed matrix has them."""
        if self.input_order is None:
            return x
        assert isinstance(x, Tensor), "rows in fp8 meet a matrix in fp8, which is in no other order"
        return x.index_select(-1, self.input_order)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.source is not None and self.packed is not None and self.method.quantizes_rows:
            self.source.quantize_rows()


class ExactLinear(Linear):
    """A small one whose weight is never rounded, whatever the method, because what it makes decides of much else."""

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method.unrounded(), shard)


class QKVLinear(Linear):
    """Query, key and value projections as one, cut by heads; ranks beyond the key-value heads share them.

    A checkpoint that is `grouped` has, in one tensor, the query heads of the first key-value head, its key, its value,
    then those of the next; or it has the queries apart, and the rest so. A layer that is `gated` has a gate for each
    query head, too, which the checkpoint has behind that head's query. What comes out is bounded by `clip`. Of heads
    that are paired, each of the first half with one of the second, ranks have pairs. With several `blocks` the
    checkpoint has, in one tensor, so large a part of the queries, the values and the keys, then the next of each.
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
    ) -> None:
        assert not (paired and (grouped or gated or blocks > 1)), "such heads are in halves as they are"
        self.clip, self.head_dim, self.parts = clip, head_dim, 2 if paired else 1
        self.blocks = blocks
        heads = Span(num_heads // self.parts, head_dim)
        kv_heads = Span(num_kv_heads // self.parts, head_dim, replicated=True)
        whole = (heads, kv_heads, kv_heads, heads) if gated else (heads, kv_heads, kv_heads)
        spans = tuple(span for span in whole for _ in range(self.parts))
        super().__init__(
            in_features=hidden_size,
            out_features=sum(span.size for span in spans),
            bias=bias,
            dtype=dtype,
            name=name,
            cut="output",
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

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        if self.blocks > 1:
            return list(self.pieces_of(names[0], (0, 2, 1)))
        if len(names) == 1:
            return super().pieces(names)
        return super().pieces([name for name in names for _ in range(self.parts)])

    def heads(self, x: Tensor | QuantizedRows, step: StepContext) -> Sequence[Tensor]:
        """x [T, K] -> views q [T, Hq, D], k and v [T, Hkv, D], and perhaps gates [T, Hq, D], of one [T, N]."""
        rows = self(x, step)
        if self.clip is not None:
            rows = rows.clamp(-self.clip, self.clip)
        return torch.split_with_sizes(rows.view(x.shape[0], -1, self.head_dim), self.head_counts, 1)


class GateUpLinear(Linear):
    """The gate and up projections of a gated MLP as one: `act(gate(x)) * up(x)`, [T, K] -> [T, I].

    With `prepare` it is `act(prepare(gate(x))) * up(x)`. `up_first` says that a checkpoint in which both are one tensor
    has the rows of up before those of gate.
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
        cut: Cut = "output",
        prepare: Callable[[Tensor], Tensor] | None = None,
        up_first: bool = False,
        member: Member | None = None,
    ) -> None:
        self.up_first = up_first
        super().__init__(
            in_features=hidden_size,
            out_features=2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            name=name,
            cut=cut,
            spans=(Span(intermediate_size), Span(intermediate_size)),
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

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        if self.up_first and len(names) == 1:
            return list(self.pieces_of(names[0], (1, 0)))
        return super().pieces(names)

    def quantize_rows(self) -> None:
        self._gate, self._ending = GATED_FP8[self.activation], None

    def halves(self) -> int:
        return 2 if self.activation in FUSED else 1
