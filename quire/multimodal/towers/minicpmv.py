# SPDX-License-Identifier: Apache-2.0
"""Tower of MiniCPM-V 4.6 (2026): SigLIP on images and frames of any proportions, patches merged inside and behind it.

Shapes: n patches, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module
from quire.layers.linear import QKVLinear
from quire.models.json_object import JsonObject
from quire.multimodal.processors.minicpmv import IMAGE_NAMES, VIDEO_NAMES
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

Grid = tuple[int, int]
"""Rows and columns of a tile's patches."""
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
        colors = eyes.integer("num_channels", 3)
        self.patch = PatchLinear(
            patch=(colors, patch, patch),
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
        """Compute the tiles of an image or of a video's frames, one at a time."""
        values, sizes = VIDEO_NAMES if VIDEO_NAMES[0] in arrays else IMAGE_NAMES
        pixels = arrays[values][0]
        colors, side, _ = pixels.shape
        patches = pixels.reshape(colors, side, -1, side).transpose(2, 0, 1, 3)
        found, start = [], 0
        for rows, columns in arrays[sizes].reshape(-1, 2).tolist():
            own = patches[start : start + rows * columns]
            found.append((yield from self._tile(np.ascontiguousarray(own), (rows, columns))))
            start += rows * columns
        return Embeddings(torch.cat(found))

    def _tile(self, patches: NDArray[Any], grid: Grid) -> Generator[None, None, Tensor]:
        """Compute [m, H] of patches [n, 3, p, p]."""
        x = yield from in_slices(self.patch, patches.reshape(len(patches), -1), self)
        x = x + ops.embedding(self._places(grid), self.positions.weight)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, sequences([len(x)], self.device))
            if self.inner is not None and number == self.inner_at:
                x = yield from self.inner.slices(x, grid)
                grid = halved(grid)
        return (yield from self._merged(self.post_norm(x), grid))

    def _merged(self, x: Tensor, grid: Grid) -> Generator[None, None, Tensor]:
        for merger in self.mergers:
            x = merger(squares_of(x, grid))
            grid = halved(grid)
            yield
        return x

    def _places(self, grid: Grid) -> Tensor:
        """Return [n] the learned position that is nearest to each patch, as a share of the image."""
        edges = torch.arange(1 / self.side, 1.0, 1 / self.side)
        rows, columns = (torch.bucketize(torch.arange(side) / side, edges, right=True) for side in grid)
        return (rows[:, None] * self.side + columns).flatten().to(self.device)


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

    def slices(self, x: Tensor, grid: Grid) -> Generator[None, None, Tensor]:
        """Compute the patches of a tile."""
        unit, size = _SQUARE**2, self.shape.channels
        x = squares_of(x, grid).view(-1, size)
        q, k, v = self.qkv.heads(self.norm(x), NO_STEP)
        yield
        metadata = sequences([unit] * (len(x) // unit), x.device)
        attended = ops.bidirectional_attention(q, k, v, metadata, self.shape.head_dim**-0.5)
        yield
        squares = (x + self.out(attended.flatten(1), NO_STEP)).view(-1, unit, size)
        yield
        merged: Tensor = self.merge(squares.flatten(1)) + squares.mean(1)
        return merged


def squares_of(x: Tensor, grid: Grid) -> Tensor:
    """Return the squares of a tile's patches as rows: [n, C] -> [n / 4, 4 * C].

    Raises:
        ValidationError: the tile has no whole squares.
    """
    rows, columns = grid
    if rows % _SQUARE or columns % _SQUARE:
        raise ValidationError(f"a tile of {rows} x {columns} patches has no whole squares of {_SQUARE}")
    return merged_squares(x, rows, columns, _SQUARE)


def halved(grid: Grid) -> Grid:
    """Return the grid after a merger."""
    return grid[0] // _SQUARE, grid[1] // _SQUARE
