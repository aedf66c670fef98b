# SPDX-License-Identifier: Apache-2.0
"""Layers that support adapters, under one interface: linear layers and heads, tables, per-head weights.

Shapes: a [r, inputs] and b [outputs, r] are a module's LoRA weights, as in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.low_rank import LowRankStacks, SlotMemory
from quire.layers.adapter_rows import AdapterEmbeddingRows, AdapterOutputRows
from quire.layers.base import Layer
from quire.layers.embedding import HeadAdapters, TableAdapters, VocabEmbedding
from quire.layers.head import HeadLinear
from quire.layers.linear import Linear
from quire.layers.matrix import ModuleRows
from quire.layers.per_head_linear import PerHeadLinear
from quire.layers.slot import length
from quire.layers.turns import LayerTurns
from quire.models.base import CausalLM, UnsplitModel


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """Linear layer or output head with LoRA."""

    layer: Linear | VocabEmbedding
    parts: tuple[int, ...]
    """Outputs of each part; a module merged with others has its own part."""
    is_here: bool = True
    """True if this rank has the layer."""

    is_table = False
    blocks = 1  # stacks per adapter
    has_biases = True  # an adapter may add a bias

    @property
    def inputs(self) -> int:
        """Inputs of all ranks."""
        return self.layer.inputs

    @property
    def columns(self) -> slice:
        """Inputs of this rank."""
        return self.layer.columns

    def weight(self) -> Tensor:
        """Return this rank's weight [outputs, inputs], unpacked."""
        return self.layer.unpacked()

    @property
    def bias(self) -> Tensor | None:
        """Bias of this rank's outputs."""
        return self.layer.bias

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the stored LoRA weights, for adapters stored in `dtype`."""
        return dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LowRankStacks:
        """Return stacks for `num_slots` adapters."""
        return LowRankStacks.empty(num_slots, self.parts, length(self.layer.columns), max_rank, dtype, memory)

    def put(self, stacks: LowRankStacks, part: int, piece: ModuleRows, a: Tensor, b: Tensor) -> None:
        """Write a and b to stacks of one adapter, at the place of the piece's outputs."""
        _put(stacks, part, self.layer.columns, piece, a, b)

    def offset(self, stacks: LowRankStacks, part: int, piece: ModuleRows, by: Tensor | float) -> None:
        """Write an offset of the piece's outputs, which may also be multiplied by factors."""
        _offset(stacks, part, piece, by)

    @property
    def num_rows(self) -> int:
        """Rows of `weight`."""
        return sum(self.parts)

    def scale_rows(self, stacks: LowRankStacks, factors: Tensor) -> None:
        """Multiply the rows of weight and product by factors [N], in stacks of one adapter."""
        _scale_rows(stacks, factors)

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        """Return the pieces of the modules' outputs on this rank, none across parts."""
        if len(names) == 1 and len(self.layer.pieces(names)) == 1 < len(self.parts):
            return list(self.layer.pieces_of(names[0], range(len(self.parts))))
        return self.layer.pieces(names)

    def allocate(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory
    ) -> LowRankStacks:
        """Allocate slots for `num_slots` adapters and attach them to the layer."""
        self.layer.adapters = self.stacks(num_slots, max_rank, dtype, memory)
        return self.layer.adapters

    def allocate_rows(
        self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterOutputRows | None:
        """Allocate up to `max_rows` replaced rows per adapter, if the layer is a table."""
        if not isinstance(self.layer, VocabEmbedding):
            return None
        self.layer.adapter_outputs = AdapterOutputRows(num_slots, max_rows, self.layer.shape, dtype, device)
        return self.layer.adapter_outputs

    def launch(self, stacks: LowRankStacks, row: Tensor) -> None:
        """Launch the LoRA kernel for a row, [1] int32, without an adapter."""
        dtype = torch.float32 if isinstance(self.layer, VocabEmbedding) else self.layer.dtype
        out, x = (row.new_zeros(1, size, dtype=dtype) for size in (stacks.b.shape[-1], stacks.a.shape[2]))
        ops.low_rank_linear(out, x, row, stacks)


@dataclass(frozen=True, slots=True)
class AdaptableHead(AdaptableLayer):
    """Layer after the pooler, which an adapter may replace; neither is ever quantized."""

    layer: HeadLinear

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, as in the layer."""
        return torch.float32

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LowRankStacks:
        """Return stacks for `num_slots` adapters of a rank up to the number of outputs."""
        return AdaptableLayer.stacks(self, num_slots, max(max_rank, self.layer.num_rows), dtype, memory)


@dataclass(frozen=True, slots=True)
class AdaptableTurn(AdaptableLayer):
    """Layer shared by several layers of the model in turn, as one of them sees it."""

    layer: Linear
    turn: int = 0

    def allocate(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory
    ) -> LowRankStacks:
        """Allocate slots beside those of the other turns."""
        assert self.layer.turns is not None, "only layers used in turns"
        slots = self.layer.turns.slots
        stacks = slots.of_layer(
            self.turn, num_slots, lambda count: self.stacks(count, max_rank, dtype, memory)
        )
        self.layer.adapters = slots.all
        return stacks

    def launch(self, stacks: LowRankStacks, row: Tensor) -> None:
        """Launch once for all turns."""
        if self.turn == 0:
            AdaptableLayer.launch(self, stacks, row)


@dataclass(frozen=True, slots=True)
class AdaptableExpert(AdaptableLayer):
    """Weight of one expert; one call computes the products of all experts of a layer."""

    layer: Linear

    def allocate(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory
    ) -> LowRankStacks:
        """Allocate slots beside those of the other experts."""
        assert self.layer.shared_adapters is not None, "only experts"
        return self.layer.shared_adapters.of_layer(
            self.layer.expert, num_slots, lambda count: self.stacks(count, max_rank, dtype, memory)
        )

    def launch(self, stacks: LowRankStacks, row: Tensor) -> None:
        """Launch for the first expert only; all have the same shapes."""
        assert self.layer.shared_adapters is not None, "only experts"
        if self.layer.expert == self.layer.shared_adapters.numbers.start:
            AdaptableLayer.launch(self, stacks, row)


@dataclass(frozen=True, slots=True)
class AdaptableTable:
    """Embedding table [V, H]: a weight [H, V] whose inputs are token ids."""

    layer: VocabEmbedding
    is_here: bool = True

    is_table = True
    blocks = 1
    has_biases = False
    bias = None

    @property
    def parts(self) -> tuple[int, ...]:
        """One part."""
        return (self.layer.inputs,)

    @property
    def inputs(self) -> int:
        """Number of tokens."""
        return self.layer.shape[0]

    @property
    def columns(self) -> slice:
        """Tokens whose rows this rank has."""
        return self.layer.rows[0]

    def weight(self) -> Tensor:
        """Return this rank's table, [H, V]."""
        return self.layer.unpacked().t()

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the stored LoRA weights; table lookups need floats."""
        return torch.bfloat16 if dtype is torch.int8 else dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LowRankStacks:
        """Return stacks for `num_slots` adapters, for this rank's tokens."""
        return LowRankStacks.empty(num_slots, self.parts, length(self.layer.rows[0]), max_rank, dtype, memory)

    def put(self, stacks: LowRankStacks, part: int, piece: ModuleRows, a: Tensor, b: Tensor) -> None:
        _put(stacks, part, self.layer.rows[0], piece, a, b)

    def offset(self, stacks: LowRankStacks, part: int, piece: ModuleRows, by: Tensor | float) -> None:
        _offset(stacks, part, piece, by)

    @property
    def num_rows(self) -> int:
        """Features of a row."""
        return self.layer.inputs

    def scale_rows(self, stacks: LowRankStacks, factors: Tensor) -> None:
        _scale_rows(stacks, factors)

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        """Return one piece: the whole row."""
        everything = slice(0, self.layer.inputs)
        return [ModuleRows(names[0], self.layer.inputs, everything, everything, everything)]

    def allocate(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory
    ) -> LowRankStacks:
        stacks = self.stacks(num_slots, max_rank, dtype, memory)
        self.layer.table_adapters = TableAdapters(stacks, self.layer.group, self.layer.rows[0])
        return stacks

    def allocate_rows(
        self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterEmbeddingRows:
        """Allocate up to `max_rows` replaced rows per adapter."""
        self.layer.adapter_embeddings = AdapterEmbeddingRows(
            num_slots, max_rows, self.layer.shape, dtype, device
        )
        return self.layer.adapter_embeddings

    def launch(self, stacks: LowRankStacks, row: Tensor) -> None:
        rows = row.new_zeros(1, stacks.b.shape[-1], dtype=self.layer.out_dtype)
        TableAdapters(stacks).add(rows, torch.zeros_like(row, dtype=torch.int64), row)


@dataclass(frozen=True, slots=True)
class AdaptableHeads:
    """Weight [N, K] for each attention head, as the checkpoint multiplies by it or its inverse direction."""

    layer: PerHeadLinear
    is_here: bool = True

    is_table = False
    has_biases = False
    bias = None

    @property
    def blocks(self) -> int:
        """One per head of this rank."""
        return self.layer.num_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """One part."""
        return (self.layer.matrix_shape()[0] // self.blocks,)

    @property
    def inputs(self) -> int:
        """Inputs of the checkpoint's module."""
        return self.layer.inputs

    @property
    def columns(self) -> slice:
        """All inputs."""
        return slice(0, self.inputs)

    def weight(self) -> Tensor:
        """Return this rank's weights, head after head."""
        weight = self.layer.unpacked()
        if not self.layer.inverted:
            return weight
        return torch.unflatten(weight, 0, (self.blocks, -1)).transpose(1, 2).flatten(0, 1)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LowRankStacks:
        """Return stacks for `num_slots` adapters."""
        inputs, count = self.layer.matrix_shape()[1], num_slots * self.blocks
        stacks = LowRankStacks.empty(count, self.parts, inputs, max_rank, dtype, memory)
        if not self.layer.inverted:
            return stacks
        return replace(stacks, input_factors=torch.ones(count, inputs, device=memory.device))

    def put(self, stacks: LowRankStacks, part: int, piece: ModuleRows, a: Tensor, b: Tensor) -> None:
        """Write a and b to stacks of one adapter; a piece is a head."""
        if not length(piece.place):
            return  # on another rank
        head, rank, own = piece.place.start // length(piece.place), len(a), b[piece.rows]
        first, then = (own, a) if self.layer.inverted else (a.t(), own.t())
        stacks.a[head, part, :, :rank], stacks.b[head, :rank] = first, then

    def offset(self, stacks: LowRankStacks, part: int, piece: ModuleRows, by: Tensor | float) -> None:
        """Mark the head as affine; there are no biases."""
        if length(piece.place) and not self.layer.inverted:
            stacks.affine[piece.place.start // length(piece.place), part] = 1

    @property
    def num_rows(self) -> int:
        """Rows of all heads."""
        return self.layer.num_rows

    def scale_rows(self, stacks: LowRankStacks, factors: Tensor) -> None:
        """Multiply rows by factors [N]; they are inputs where the layer applies the inverse direction."""
        of_heads = torch.unflatten(factors, 0, (self.blocks, -1))
        if stacks.input_factors is not None:
            stacks.input_factors.copy_(of_heads)
            return
        stacks.b.mul_(of_heads[:, None])
        stacks.factors.copy_(of_heads)

    def pieces(self, names: Sequence[str]) -> list[ModuleRows]:
        """Return one piece per head."""
        return self.layer.pieces(names)

    def allocate(
        self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory
    ) -> LowRankStacks:
        stacks = self.stacks(num_slots, max_rank, dtype, memory)
        self.layer.adapters = HeadAdapters(stacks, self.blocks)
        return stacks

    def allocate_rows(self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Return None: it is no table."""

    def launch(self, stacks: LowRankStacks, row: Tensor) -> None:
        out, x = (
            row.new_zeros(1, self.blocks, size, dtype=self.layer.dtype)
            for size in (stacks.b.shape[-1], stacks.a.shape[2])
        )
        HeadAdapters(stacks, self.blocks).add(out, x, row)


Adaptable = AdaptableLayer | AdaptableTable | AdaptableHeads


def adaptable_layers(model: CausalLM) -> Iterator[tuple[list[str], list[str], Adaptable]]:
    """Yield each layer with its modules' names in transformers and in checkpoints; a tied table is yielded twice.

    Layers of other pipeline stages are included, so that every stage refuses the same adapters.
    """
    here = {layer for _, layer in model.checkpoint_layers()}
    layers, head, enters = model.uncut or UnsplitModel([*model.adapter_layers()], model.lm_head)
    for names, stored, layer in layers:
        if isinstance(layer, Linear) and layer.turns is not None:
            yield from _turn_layers(names, stored, layer, layer.turns, layer in here)
            continue
        for own in _adaptable_parts(model, layer, len(names), layer in here, head, enters=enters):
            yield names, stored, own
    if head is not None and _takes_adapters(head):
        is_here, name = model.lm_head is not None, [model.renamed.get("lm_head", "lm_head")]
        yield name, name, AdaptableLayer(head, (head.num_rows,), is_here)


def _turn_layers(
    names: list[str], stored: list[str], layer: Linear, turns: LayerTurns, is_here: bool
) -> Iterator[tuple[list[str], list[str], Adaptable]]:
    parts = (layer.num_rows,) if len(names) == 1 else tuple(map(length, layer.rows))
    for turn, number in enumerate(turns.layers):
        there, there_stored = ([turns.name_at(number, name) for name in of] for of in (names, stored))
        yield there, there_stored, AdaptableTurn(layer, parts, is_here, turn)


def _adaptable_parts(
    model: CausalLM,
    layer: Layer,
    num_modules: int,
    is_here: bool,
    head: VocabEmbedding | None,
    *,
    enters: bool,
) -> Iterator[Adaptable]:
    """Yield what supports adapters in a layer that stands for `num_modules` modules, except the head."""
    if isinstance(layer, Linear) and layer.takes_adapters:
        parts = (layer.num_rows,) if num_modules == 1 else tuple(map(length, layer.rows))
        if isinstance(layer, HeadLinear):
            yield AdaptableHead(layer, parts, is_here)
        else:
            yield AdaptableLayer(layer, parts, is_here)
    if isinstance(layer, Linear) and layer.shared_adapters is not None:
        yield AdaptableExpert(layer, tuple(map(length, layer.rows)), is_here and layer.is_here)
    if isinstance(layer, PerHeadLinear):
        yield AdaptableHeads(layer, is_here)
    is_looked_up = layer is not head or model.config.arch.tie_word_embeddings
    if isinstance(layer, VocabEmbedding) and is_looked_up and _takes_adapters(layer):
        yield AdaptableTable(layer, is_here and enters)


def _put(stacks: LowRankStacks, part: int, columns: slice, piece: ModuleRows, a: Tensor, b: Tensor) -> None:
    rank = len(a)
    stacks.a[0, part, :, :rank] = a[:, columns].t()
    stacks.b[0, :rank, piece.place] = b[piece.rows].t()


def _offset(stacks: LowRankStacks, part: int, piece: ModuleRows, by: Tensor | float) -> None:
    stacks.offsets[0, piece.place] = by
    stacks.affine[0, part] = 1


def _scale_rows(stacks: LowRankStacks, factors: Tensor) -> None:
    stacks.b[0] = stacks.b[0] * factors
    stacks.factors[0] = factors


def _takes_adapters(layer: VocabEmbedding) -> bool:
    return layer.takes_adapters and not layer.rearranges
