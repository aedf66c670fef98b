"""What can add something of adapters, under one set of verbs: layers with a product, tables of rows, matrices of heads.

Shapes: a [r, inputs] and b [outputs, r] are the matrices of a module, as its checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.lora import LoraStacks, SlotMemory
from quire.layers.base import Layer
from quire.layers.embedding import VocabEmbedding
from quire.layers.head_adapters import HeadAdapters
from quire.layers.linear import Linear, Turns
from quire.layers.matrix import Piece
from quire.layers.own_rows import OwnOutputs, OwnRows
from quire.layers.per_head import PerHeadLinear
from quire.layers.pooling_head import HeadLinear
from quire.layers.slot import length
from quire.layers.table_adapters import TableAdapters
from quire.models.base import CausalLM, Uncut


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """A layer with a product: a linear one, or the output head."""

    layer: Linear | VocabEmbedding
    parts: tuple[int, ...]
    """Outputs of each: a module that is merged with others has a part of its own."""
    is_here: bool = True
    """Whether this rank has it."""

    is_table = False
    blocks = 1
    """Stacks that one adapter takes."""
    has_biases = True
    """Whether it can add to them."""

    @property
    def inputs(self) -> int:
        """Those of all ranks."""
        return self.layer.inputs

    @property
    def columns(self) -> slice:
        """The inputs of this rank."""
        return self.layer.columns

    def weight(self) -> Tensor:
        """The finished matrix [outputs, inputs] of this rank."""
        return self.layer.unpacked()

    @property
    def bias(self) -> Tensor | None:
        """Of this rank's outputs."""
        return self.layer.bias

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """What its matrices are kept in, of an adapter that is kept in `dtype`."""
        return dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Room for so many adapters."""
        return LoraStacks.empty(num_slots, self.parts, length(self.layer.columns), max_rank, dtype, memory)

    def put(self, stacks: LoraStacks, part: int, piece: Piece, a: Tensor, b: Tensor) -> None:
        """Let the product of a and b count where the piece of its outputs stands, in stacks of one adapter."""
        _put(stacks, part, self.layer.columns, piece, a, b)

    def offset(self, stacks: LoraStacks, part: int, piece: Piece, by: Tensor | float) -> None:
        """Let these be added to the piece's outputs, which something may multiply, too."""
        _offset(stacks, part, piece, by)

    @property
    def num_rows(self) -> int:
        """Rows of `weight`."""
        return sum(self.parts)

    def lengthen(self, stacks: LoraStacks, factors: Tensor) -> None:
        """Multiply the rows of weight and product [N], in stacks of one adapter."""
        _lengthen(stacks, factors)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """What it makes of the modules' outputs, none of more than a part."""
        if len(names) == 1 and len(self.layer.pieces(names)) == 1 < len(self.parts):
            return list(self.layer.pieces_of(names[0], range(len(self.parts))))
        return self.layer.pieces(names)

    def make_room(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Slots for so many adapters, of which it adds what they have."""
        self.layer.adapters = self.stacks(num_slots, max_rank, dtype, memory)
        return self.layer.adapters

    def give_rows(
        self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> OwnOutputs | None:
        """Let adapters have so many rows of their own, if it is a table."""
        if not isinstance(self.layer, VocabEmbedding):
            return None
        self.layer.own_outputs = OwnOutputs(num_slots, max_rows, self.layer.shape, dtype, device)
        return self.layer.own_outputs

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """Launch what adds to a row, [1] int32, that has no adapter."""
        dtype = torch.float32 if isinstance(self.layer, VocabEmbedding) else self.layer.dtype
        out, x = (row.new_zeros(1, size, dtype=dtype) for size in (stacks.b.shape[-1], stacks.a.shape[2]))
        ops.lora_linear(out, x, row, stacks)


@dataclass(frozen=True, slots=True)
class AdaptableHead(AdaptableLayer):
    """A layer behind what is pooled, of which an adapter may have all: it is never rounded, and nor is that."""

    layer: HeadLinear

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """As the layer is."""
        return torch.float32

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Room for so many adapters, each of a rank of any outputs."""
        return AdaptableLayer.stacks(self, num_slots, max(max_rank, self.layer.num_rows), dtype, memory)


@dataclass(frozen=True, slots=True)
class AdaptableTurn(AdaptableLayer):
    """A layer that several of the model's take turns at, as one of them has it."""

    layer: Linear
    turn: int = 0

    def make_room(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Slots beside those of the other turns."""
        assert self.layer.turns is not None, "a layer of turns"
        slots = self.layer.turns.slots
        stacks = slots.of_layer(
            self.turn, num_slots, lambda count: self.stacks(count, max_rank, dtype, memory)
        )
        self.layer.adapters = slots.all
        return stacks

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """Once for all turns."""
        if self.turn == 0:
            AdaptableLayer.launch(self, stacks, row)


@dataclass(frozen=True, slots=True)
class AdaptableExpert(AdaptableLayer):
    """A matrix of an expert, of whose layer one call makes all products."""

    layer: Linear

    def make_room(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Slots beside those of the other experts."""
        assert self.layer.shared_adapters is not None, "an expert's"
        return self.layer.shared_adapters.of_layer(
            self.layer.expert, num_slots, lambda count: self.stacks(count, max_rank, dtype, memory)
        )

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """The first one, for all, which have the same shapes."""
        assert self.layer.shared_adapters is not None, "an expert's"
        if self.layer.expert == self.layer.shared_adapters.numbers.start:
            AdaptableLayer.launch(self, stacks, row)


@dataclass(frozen=True, slots=True)
class AdaptableTable:
    """A table [V, H] of which rows are looked up: a matrix [H, V] whose inputs are tokens."""

    layer: VocabEmbedding
    is_here: bool = True

    is_table = True
    blocks = 1
    has_biases = False
    bias = None

    @property
    def parts(self) -> tuple[int, ...]:
        """One."""
        return (self.layer.inputs,)

    @property
    def inputs(self) -> int:
        """Tokens."""
        return self.layer.shape[0]

    @property
    def columns(self) -> slice:
        """The tokens whose rows this rank has."""
        return self.layer.rows[0]

    def weight(self) -> Tensor:
        """The table of this rank, [H, V]."""
        return self.layer.unpacked().t()

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """As that of `AdaptableLayer`; what is looked up is a float."""
        return torch.bfloat16 if dtype is torch.int8 else dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Room for so many adapters, for the tokens whose rows this rank has."""
        return LoraStacks.empty(num_slots, self.parts, length(self.layer.rows[0]), max_rank, dtype, memory)

    def put(self, stacks: LoraStacks, part: int, piece: Piece, a: Tensor, b: Tensor) -> None:
        """As that of `AdaptableLayer`."""
        _put(stacks, part, self.layer.rows[0], piece, a, b)

    def offset(self, stacks: LoraStacks, part: int, piece: Piece, by: Tensor | float) -> None:
        """As that of `AdaptableLayer`."""
        _offset(stacks, part, piece, by)

    @property
    def num_rows(self) -> int:
        """Features of a row."""
        return self.layer.inputs

    def lengthen(self, stacks: LoraStacks, factors: Tensor) -> None:
        """As that of `AdaptableLayer`."""
        _lengthen(stacks, factors)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """All of a row."""
        everything = slice(0, self.layer.inputs)
        return [Piece(names[0], self.layer.inputs, everything, everything, everything)]

    def make_room(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """As that of `AdaptableLayer`."""
        stacks = self.stacks(num_slots, max_rank, dtype, memory)
        self.layer.table_adapters = TableAdapters(stacks, self.layer.group, self.layer.rows[0])
        return stacks

    def give_rows(self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> OwnRows:
        """Let adapters have so many rows of their own."""
        self.layer.own_rows = OwnRows(num_slots, max_rows, self.layer.shape, dtype, device)
        return self.layer.own_rows

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """As that of `AdaptableLayer`."""
        rows = row.new_zeros(1, stacks.b.shape[-1], dtype=self.layer.out_dtype)
        TableAdapters(stacks).add(rows, torch.zeros_like(row, dtype=torch.int64), row)


@dataclass(frozen=True, slots=True)
class AdaptableHeads:
    """A matrix [N, K] for each head, which may be what the checkpoint multiplies by, or the other way round."""

    layer: PerHeadLinear
    is_here: bool = True

    is_table = False
    has_biases = False
    bias = None

    @property
    def blocks(self) -> int:
        """One for each head of this rank."""
        return self.layer.num_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """One."""
        return (self.layer.matrix_shape()[0] // self.blocks,)

    @property
    def inputs(self) -> int:
        """Of the checkpoint's module."""
        return self.layer.inputs

    @property
    def columns(self) -> slice:
        """All of them."""
        return slice(0, self.inputs)

    def weight(self) -> Tensor:
        """As that of `AdaptableLayer`, one head after the other."""
        weight = self.layer.unpacked()
        if not self.layer.inverted:
            return weight
        return torch.unflatten(weight, 0, (self.blocks, -1)).transpose(1, 2).flatten(0, 1)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """As that of `AdaptableLayer`."""
        return dtype

    def stacks(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """Room for so many adapters."""
        inputs, count = self.layer.matrix_shape()[1], num_slots * self.blocks
        stacks = LoraStacks.empty(count, self.parts, inputs, max_rank, dtype, memory)
        if not self.layer.inverted:
            return stacks
        return replace(stacks, input_factors=torch.ones(count, inputs, device=memory.device))

    def put(self, stacks: LoraStacks, part: int, piece: Piece, a: Tensor, b: Tensor) -> None:
        """As that of `AdaptableLayer`; a piece is a head."""
        if not length(piece.place):
            return  # another rank's
        head, rank, own = piece.place.start // length(piece.place), len(a), b[piece.rows]
        first, then = (own, a) if self.layer.inverted else (a.t(), own.t())
        stacks.a[head, part, :, :rank], stacks.b[head, :rank] = first, then

    def offset(self, stacks: LoraStacks, part: int, piece: Piece, by: Tensor | float) -> None:
        """As that of `AdaptableLayer`; there are no biases."""
        if length(piece.place) and not self.layer.inverted:
            stacks.affine[piece.place.start // length(piece.place), part] = 1

    @property
    def num_rows(self) -> int:
        """Those of all heads."""
        return self.layer.num_rows

    def lengthen(self, stacks: LoraStacks, factors: Tensor) -> None:
        """As that of `AdaptableLayer`; rows are what goes in, where the checkpoint multiplies what comes out."""
        of_heads = torch.unflatten(factors, 0, (self.blocks, -1))
        if stacks.input_factors is not None:
            stacks.input_factors.copy_(of_heads)
            return
        stacks.b.mul_(of_heads[:, None])
        stacks.factors.copy_(of_heads)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """One for each head."""
        return self.layer.pieces(names)

    def make_room(self, num_slots: int, max_rank: int, dtype: torch.dtype, memory: SlotMemory) -> LoraStacks:
        """As that of `AdaptableLayer`."""
        stacks = self.stacks(num_slots, max_rank, dtype, memory)
        self.layer.adapters = HeadAdapters(stacks, self.blocks)
        return stacks

    def give_rows(self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """It is no table."""

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """As that of `AdaptableLayer`."""
        out, x = (
            row.new_zeros(1, self.blocks, size, dtype=self.layer.dtype)
            for size in (stacks.b.shape[-1], stacks.a.shape[2])
        )
        HeadAdapters(stacks, self.blocks).add(out, x, row)


Adaptable = AdaptableLayer | AdaptableTable | AdaptableHeads


def adaptable_layers(model: CausalLM) -> Iterator[tuple[list[str], list[str], Adaptable]]:
    """Each with the names of its modules in transformers, and in checkpoints; a table that is the head, too, is both.

    Those of other pipeline stages are among them, so each stage refuses an adapter for what any would refuse it for.
    """
    here = {layer for _, layer in model.checkpoint_layers()}
    layers, head, enters = model.uncut or Uncut([*model.adapter_layers()], model.lm_head)
    for names, stored, layer in layers:
        if isinstance(layer, Linear) and layer.turns is not None:
            yield from _of_turns(names, stored, layer, layer.turns, layer in here)
            continue
        for own in _of_layer(model, layer, len(names), layer in here, head, enters=enters):
            yield names, stored, own
    if head is not None and _takes_adapters(head):
        is_here, name = model.lm_head is not None, [model.renamed.get("lm_head", "lm_head")]
        yield name, name, AdaptableLayer(head, (head.num_rows,), is_here)


def _of_turns(
    names: list[str], stored: list[str], layer: Linear, turns: Turns, is_here: bool
) -> Iterator[tuple[list[str], list[str], Adaptable]]:
    parts = (layer.num_rows,) if len(names) == 1 else tuple(map(length, layer.rows))
    for turn, number in enumerate(turns.layers):
        there, there_stored = ([turns.name_at(number, name) for name in of] for of in (names, stored))
        yield there, there_stored, AdaptableTurn(layer, parts, is_here, turn)


def _of_layer(
    model: CausalLM,
    layer: Layer,
    num_modules: int,
    is_here: bool,
    head: VocabEmbedding | None,
    *,
    enters: bool,
) -> Iterator[Adaptable]:
    """What of a layer, which stands for so many modules, can be adapted, but for the head."""
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


def _put(stacks: LoraStacks, part: int, columns: slice, piece: Piece, a: Tensor, b: Tensor) -> None:
    rank = len(a)
    stacks.a[0, part, :, :rank] = a[:, columns].t()
    stacks.b[0, :rank, piece.place] = b[piece.rows].t()


def _offset(stacks: LoraStacks, part: int, piece: Piece, by: Tensor | float) -> None:
    stacks.offsets[0, piece.place] = by
    stacks.affine[0, part] = 1


def _lengthen(stacks: LoraStacks, factors: Tensor) -> None:
    stacks.b[0] = stacks.b[0] * factors
    stacks.factors[0] = factors


def _takes_adapters(layer: VocabEmbedding) -> bool:
    return layer.takes_adapters and not layer.rearranges
