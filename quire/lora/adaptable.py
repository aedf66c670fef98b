"""What can add something of adapters, under one set of verbs: layers with a product, and tables of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.lora import LoraStacks
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.matrix import Piece
from quire.layers.own_rows import OwnOutputs, OwnRows
from quire.layers.slot import length
from quire.layers.table_adapters import TableAdapters
from quire.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """A layer with a product: a linear one, or the output head."""

    layer: Linear | VocabEmbedding
    parts: tuple[int, ...]
    """Outputs of each: a module that is merged with others has a part of its own."""

    is_table = False

    @property
    def inputs(self) -> int:
        """Those of all ranks."""
        return self.layer.inputs

    @property
    def columns(self) -> slice:
        """Of the inputs, those that this rank has."""
        return self.layer.columns

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """What it makes of the modules' outputs."""
        return self.layer.pieces(names)

    def give(self, stacks: LoraStacks) -> None:
        """Let it add what these have."""
        self.layer.adapters = stacks

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
        dtype = torch.float32 if isinstance(self.layer, VocabEmbedding) else stacks.b.dtype
        out, x = (row.new_zeros(1, size, dtype=dtype) for size in (stacks.b.shape[-1], stacks.a.shape[2]))
        ops.lora_linear(out, x, row, stacks)


@dataclass(frozen=True, slots=True)
class AdaptableTable:
    """A table [V, H] of which rows are looked up: a matrix [H, V] whose inputs are tokens."""

    layer: VocabEmbedding

    is_table = True

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

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """All of a row."""
        everything = slice(0, self.layer.inputs)
        return [Piece(names[0], self.layer.inputs, everything, everything, everything)]

    def give(self, stacks: LoraStacks) -> None:
        """Let it add what these have."""
        self.layer.table_adapters = TableAdapters(stacks)

    def give_rows(self, num_slots: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> OwnRows:
        """Let adapters have so many rows of their own."""
        self.layer.own_rows = OwnRows(num_slots, max_rows, self.layer.shape, dtype, device)
        return self.layer.own_rows

    def launch(self, stacks: LoraStacks, row: Tensor) -> None:
        """As that of `AdaptableLayer`."""
        rows = row.new_zeros(1, stacks.b.shape[-1], dtype=self.layer.out_dtype)
        TableAdapters(stacks).add(rows, torch.zeros_like(row, dtype=torch.int64), row)


Adaptable = AdaptableLayer | AdaptableTable


def adaptable_layers(model: CausalLM) -> Iterator[tuple[list[str], Adaptable]]:
    """Each with the names of its modules; a table that is the head, too, is there as both."""
    for names, layer in model.checkpoint_layers():
        if isinstance(layer, Linear) and layer.takes_adapters:
            parts = (layer.num_rows,) if len(names) == 1 else tuple(map(length, layer.rows))
            yield names, AdaptableLayer(layer, parts)
        is_looked_up = layer is not model.lm_head or model.config.arch.tie_word_embeddings
        if isinstance(layer, VocabEmbedding) and is_looked_up and _takes_adapters(layer):
            yield names, AdaptableTable(layer)
    if model.lm_head is not None and _takes_adapters(model.lm_head):
        yield (
            [model.renamed.get("lm_head", "lm_head")],
            AdaptableLayer(model.lm_head, (model.lm_head.num_rows,)),
        )


def _takes_adapters(layer: VocabEmbedding) -> bool:
    return layer.takes_adapters and not layer.rearranges
