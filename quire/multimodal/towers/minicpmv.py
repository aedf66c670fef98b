# SPDX-License-Identifier: Apache-2.0
"""Tower of MiniCPM-V 4.6 (2026): SigLIP on images of any proportions, whose patches are merged inside and behind it.

Shapes: n patches, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module
from quire.layers.linear import QKVLinear
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    activation_of,
    in_slices,
    merged_squares,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings

Grids = list[tuple[int, int]]
"""Rows and columns of each tile's patches."""
_AT = "vision_tower"
_SQUARE = 2  # Side in patches of what is merged at a time.
_EPS = 1e-6


class MiniCPMVTower(Tower):
    """SigLIP with a merger after one of its layers, and another behind them."""

    parts = (f"{_AT}.", "merger.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        eyes = whole.child("vision_config")
        size, patch = eyes.integer("hidden_size", 768), eyes.integer("patch_size", 16)
        heads = eyes.integer("num_attention_heads", 12)
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=eyes.integer("intermediate_size", 3072),
            eps=eyes.number("layer_norm_eps", _EPS),
            activate=activation_of(eyes, "hidden_act", "gelu_pytorch_tanh"),
        )
        colours = eyes.integer("num_channels", 3)
        self.patch = PatchLinear(
            patch=(colours, patch, patch),
            outputs=size,
            bias=True,
            dtype=self.dtype,
            name=f"{_AT}.embeddings.patch_embedding",
        )
        self.side = eyes.integer("image_size", 224) // patch
        self.positions = LearnedTable(
            self.side**2, size, config=config, name=f"{_AT}.embeddings.position_embedding", suffix=".weight"
        )
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{_AT}.encoder.layers.{number}")
            for number in range(eyes.integer("num_hidden_layers", 12))
        )
        self.post_norm = tower_norm(config, "layer", size, shape.eps, f"{_AT}.post_layernorm")
        self.inner: WindowMerger | None = None
        self.inner_at = whole.integer("insert_layer_id", 6, low=0, high=len(self.blocks) - 1)
        if whole.choice("downsample_mode", ("16x", "4x"), "16x") == "16x":
            self.inner = WindowMerger(self, shape)
        else:
            self.unused = (rf"^{_AT}\.vit_merger\.",)
        rounds = whole.integer("merger_times", 1, high=8)
        outputs = [size] * (rounds - 1) + [self.hidden_size]
        self.mergers = nn.ModuleList(
            self._merger(size, each, f"merger.mlp.{number}") for number, each in enumerate(outputs)
        )

    def _merger(self, size: int, outputs: int, at: str) -> Projection:
        wide = size * _SQUARE**2
        return Projection(
            self.linear(wide, wide, True, f"{at}.linear_1"),
            self.linear(wide, outputs, True, f"{at}.linear_2"),
            lambda x: ops.activate(x, "gelu"),
            tower_norm(self.config, "layer", wide, _EPS, f"{at}.pre_norm"),
        )

    def slices(self, arrays: Arrays) -> Slices:
        grids = [(int(rows), int(columns)) for rows, columns in arrays["target_sizes"].reshape(-1, 2)]
        pixels = arrays["pixel_values"][0]
        colours, side, _ = pixels.shape
        patches = pixels.reshape(colours, side, -1, side).transpose(2, 0, 1, 3)
        x = yield from in_slices(self.patch, np.ascontiguousarray(patches.reshape(len(patches), -1)), self)
        x = x + ops.embedding(self._places(grids), self.positions.weight)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            lengths = [rows * columns for rows, columns in grids]
            x = yield from block.slices(x, sequences(lengths, self.device))
            if self.inner is not None and number == self.inner_at:
                x = yield from self.inner.slices(x, grids)
                grids = halved(grids)
        return Embeddings((yield from self._merged(self.post_norm(x), grids)))

    def _merged(self, x: Tensor, grids: Grids) -> Generator[None, None, Tensor]:
        for merger in self.mergers:
            x = merger(squares_of(x, grids))
            grids = halved(grids)
            yield
        return x

    def _places(self, grids: Grids) -> Tensor:
        """Return [n] the learned position that is nearest to each patch, as a share of the image."""
        edges = torch.arange(1 / self.side, 1.0, 1 / self.side)
        found = []
        for grid in grids:
            rows, columns = (torch.bucketize(torch.arange(side) / side, edges, right=True) for side in grid)
            found.append((rows[:, None] * self.side + columns).flatten())
        return torch.cat(found).to(self.device)


class WindowMerger(Module):
    """Attention within squares of patches, each of which then becomes one row: [n, C] -> [n / 4, C]."""

    def __init__(self, tower: Tower, shape: BlockShape) -> None:
        super().__init__()
        self.shape, at, size = shape, f"{_AT}.vit_merger", shape.channels
        wide = size * _SQUARE**2
        self.norm = tower_norm(tower.config, "layer", size, shape.eps, f"{at}.layer_norm1")
        self.qkv = QKVLinear(
            hidden_size=size,
            num_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_dim=shape.head_dim,
            bias=True,
            dtype=tower.dtype,
            name=f"{at}.self_attn.qkv_proj",
        )
        self.out = tower.linear(size, size, True, f"{at}.self_attn.out_proj")
        self.merge = Projection(
            tower.linear(wide, shape.inner * _SQUARE**2, True, f"{at}.linear_1"),
            tower.linear(shape.inner * _SQUARE**2, size, True, f"{at}.linear_2"),
            lambda x: ops.activate(x, "gelu_tanh"),
            tower_norm(tower.config, "layer", wide, shape.eps, f"{at}.pre_norm"),
        )

    def slices(self, x: Tensor, grids: Grids) -> Generator[None, None, Tensor]:
        """Compute the patches of all tiles."""
        unit, size = _SQUARE**2, self.shape.channels
        x = squares_of(x, grids).view(-1, size)
        q, k, v = self.qkv.heads(self.norm(x), NO_STEP)
        yield
        metadata = sequences([unit] * (len(x) // unit), x.device)
        attended = ops.bidirectional_attention(q, k, v, metadata, self.shape.head_dim**-0.5)
        yield
        squares = (x + self.out(attended.flatten(1), NO_STEP)).view(-1, unit, size)
        yield
        merged: Tensor = self.merge(squares.flatten(1)) + squares.mean(1)
        return merged


def squares_of(x: Tensor, grids: Grids) -> Tensor:
    """Return the squares of patches of all tiles as rows: [n, C] -> [n / 4, 4 * C].

    Raises:
        ValidationError: a tile has no whole squares.
    """
    for rows, columns in grids:
        if rows % _SQUARE or columns % _SQUARE:
            raise ValidationError(f"a tile of {rows} x {columns} patches has no whole squares of {_SQUARE}")
    tiles = torch.split_with_sizes(x, [rows * columns for rows, columns in grids])
    found = [merged_squares(tile, *grid, _SQUARE) for tile, grid in zip(tiles, grids, strict=True)]
    return torch.cat(found)


def halved(grids: Grids) -> Grids:
    """Return the grids after a merger."""
    return [(rows // _SQUARE, columns // _SQUARE) for rows, columns in grids]
