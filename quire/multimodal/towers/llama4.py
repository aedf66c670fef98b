# SPDX-License-Identifier: Apache-2.0
"""Tower of Llama 4 (2025): patches with learned and rotary positions, squares of them through an adapter.

Shapes: t tiles of n patches and a class token behind them, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.kernels import ops
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    Slices,
    Tower,
    angles_of_grid,
    merged_squares,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings

_AT = "vision_model"
_EPS = 1e-5


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU."""
    return ops.activate(x, "gelu")


class Llama4Tower(Tower):
    """Vision transformer of Llama 4 with its adapter and projection."""

    parts = (f"{_AT}.", "multi_modal_projector.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        eyes = whole.child("vision_config")
        size, heads = eyes.integer("hidden_size", 768), eyes.integer("num_attention_heads", 16)
        inner = eyes.integer("intermediate_size", 5632)
        self.patch_size = eyes.integer("patch_size", 14)
        self.side = eyes.integer("image_size", 448) // self.patch_size
        self.square = round(1 / eyes.number("pixel_shuffle_ratio", 0.5))
        self.shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=inner,
            eps=_EPS,
            activate=gelu,
            norms=("input_layernorm", "post_attention_layernorm"),
            out="self_attn.o_proj",
            interleaved=True,
        )
        self.theta = (eyes.child("rope_parameters")).number("rope_theta", 10000.0)
        colors = eyes.integer("num_channels", 3)
        self.patch = self.linear(colors * self.patch_size**2, size, False, f"{_AT}.patch_embedding.linear")
        self.class_token = LearnedTable(size, config=config, name=f"{_AT}.class_embedding")
        count = self.side**2 + 1
        self.positions = LearnedTable(count, size, config=config, name=f"{_AT}.positional_embedding_vlm")
        self.norms = nn.ModuleList(
            tower_norm(config, "layer", size, _EPS, f"{_AT}.layernorm_{place}") for place in ("pre", "post")
        )
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=self.shape, at=f"{_AT}.model.layers.{number}")
            for number in range(eyes.integer("num_hidden_layers", 34))
        )
        between, last = eyes.integer("projector_input_dim", 4096), eyes.integer("projector_output_dim", 4096)
        adapter = f"{_AT}.vision_adapter.mlp"
        self.adapter = nn.ModuleList(
            (
                self.linear(size * self.square**2, between, False, f"{adapter}.fc1"),
                self.linear(between, last, False, f"{adapter}.fc2"),
            )
        )
        self.projection = self.linear(last, self.hidden_size, False, "multi_modal_projector.linear_1")

    def slices(self, arrays: Arrays) -> Slices:
        embedded = []
        for tile in self.to_device(arrays["pixel_values"]):
            embedded.append(self._embedded(tile))
            yield
        count, per_tile = len(embedded), self.side**2 + 1
        x = torch.cat(embedded)
        metadata, angles = sequences([per_tile] * count, self.device), self._angles().repeat(count, 1)
        for block in self.blocks:
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, metadata, angles)
        done = []
        for tile in self.norms[1](x).view(count, per_tile, -1):
            done.append(self._project(tile[:-1]))
            yield
        return Embeddings(torch.cat(done))

    def _embedded(self, tile: Tensor) -> Tensor:
        """Return [n + 1, C] of a tile [3, rows, columns]."""
        side, size = self.side, self.patch_size
        patches = tile.view(-1, side, size, side, size).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
        x = torch.cat((self.patch(patches, NO_STEP), self.class_token.weight[None]))
        found: Tensor = self.norms[0](x + self.positions.weight)
        return found

    def _angles(self) -> Tensor:
        """Return [n + 1, D] of a tile: columns and then rows, counted from 1, and no rotation of the class token."""
        places = torch.arange(self.side**2)
        across, down = places % self.side + 1, places // self.side + 1
        none = torch.zeros(1, dtype=torch.long)
        columns, rows = torch.cat((across, none)), torch.cat((down, none))
        return angles_of_grid(columns, rows, self.shape.head_dim // 2, self.theta).to(self.device)

    def _project(self, patches: Tensor) -> Tensor:
        """Return [m, H] of a tile's patches [n, C]."""
        first, second = self.adapter
        squares = merged_squares(patches.contiguous(), self.side, self.side, self.square)
        inner = gelu(second(gelu(first(squares, NO_STEP)), NO_STEP))
        found: Tensor = self.projection(inner, NO_STEP)
        return found
