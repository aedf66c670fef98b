# SPDX-License-Identifier: Apache-2.0
"""Towers of Qwen2-VL (2024, arXiv:2409.12191), Qwen2.5-VL (2025, arXiv:2502.13923) and Qwen3-VL (2025).

Patches come in the order of the squares that are merged at the end, and attend within their frame. Qwen2.5-VL has
windows in most layers; Qwen3-VL has learned positions, interpolated, and DeepStack (Meng et al., 2024,
arXiv:2406.04334).

Shapes: n patches, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import GroupMetadata
from quire.layers.norm import LayerNorm, RMSNorm
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    Arrays,
    LearnedTable,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    activation_of,
    angles_of_grid,
    chunks,
    in_slices,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings

_AT = "visual"
_EPS = 1e-6


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU."""
    return ops.activate(x, "gelu")


def qkv_of(eyes: JsonObject) -> str:
    """Return the name of the projections before attention, which files in GGUF have in three."""
    return "attn.q_k_v" if eyes.flag("qkv_apart", False) else "attn.qkv"


class Merger(Projection):
    """Squares of patches through a norm and two linear layers; the norm covers patches, or squares if `after`."""

    def __init__(
        self, tower: Tower, names: tuple[str, str, str], channels: int, square: int, *, kind: str, after: bool
    ) -> None:
        wide, (norm, first, second) = channels * square, names
        super().__init__(
            tower.linear(wide, wide, True, first),
            tower.linear(wide, tower.hidden_size, True, second),
            gelu,
        )
        self.of_patches: LayerNorm | RMSNorm = tower_norm(
            tower.config, kind, wide if after else channels, _EPS, norm
        )
        self.wide, self.after = wide, after

    def forward(self, x: Tensor) -> Tensor:
        squares = x.view(-1, self.wide) if self.after else x
        return super().forward(self.of_patches(squares).view(-1, self.wide))

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Compute some squares at a time: x [n, C] -> [m, H]."""
        done = []
        for rows in chunks(len(x) * x.shape[1] // self.wide, 4.0 * self.wide**2):
            unit = self.wide // x.shape[1]
            done.append(self(x[rows.start * unit : rows.stop * unit]))
            yield
        return torch.cat(done)


class QwenVLTower(Tower):
    """Qwen2-VL: patches of pairs of frames with 2-D rotary positions, attending within their frame."""

    parts = (f"{_AT}.",)
    kind = "layer"
    """Kind of the norms, see `tower_norm`."""
    patch_bias = False
    merger_names = (f"{_AT}.merger.ln_q", f"{_AT}.merger.mlp.0", f"{_AT}.merger.mlp.2")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        eyes = whole.child("vision_config")
        shape = self.shape = self.block_shape(eyes)
        patch = eyes.integer("patch_size", 14)
        self.merge = eyes.integer("spatial_merge_size", 2)
        self.patch_size = patch
        colors = eyes.integer("in_channels", eyes.integer("in_chans", 3))
        self.patch = PatchLinear(
            patch=(colors, eyes.integer("temporal_patch_size", 2), patch, patch),
            outputs=shape.channels,
            bias=self.patch_bias,
            dtype=self.dtype,
            name=f"{_AT}.patch_embed.proj",
        )
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{_AT}.blocks.{number}")
            for number in range(eyes.integer("depth", self.usual_depth))
        )
        self.merger = Merger(
            self, self.merger_names, shape.channels, self.merge**2, kind=self.kind, after=False
        )
        self.build(eyes)

    usual_depth = 32

    def block_shape(self, eyes: JsonObject) -> BlockShape:
        """Return the blocks' shape."""
        size, heads = eyes.integer("embed_dim", 1280), eyes.integer("num_heads", 16)
        return BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=int(size * eyes.number("mlp_ratio", 4.0)),
            eps=_EPS,
            activate=activation_of(eyes, "hidden_act", "quick_gelu"),
            norms=("norm1", "norm2"),
            qkv=qkv_of(eyes),
            out="attn.proj",
        )

    def build(self, eyes: JsonObject) -> None:
        """Make what other versions have beside."""

    def slices(self, arrays: Arrays) -> Slices:
        found = {name: arrays[name] for name in arrays if name.startswith("pixel_values")}
        grids = next(arrays[name] for name in arrays if name.endswith("grid_thw"))
        frames, rows, columns = (int(size) for size in grids.reshape(-1)[:3])
        x = yield from in_slices(self.patch, next(iter(found.values())), self)
        down, across = self.places(frames, rows, columns)
        angles = angles_of_grid(down, across, self.shape.head_dim // 2, 10000.0).to(self.device)
        return (yield from self.encode(x, (frames, rows, columns), angles))

    def places(self, frames: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return [n] row and column of each patch, square by square."""
        merge = self.merge
        squares = (rows // merge, merge, columns // merge, merge)
        down = torch.arange(rows)[:, None].expand(rows, columns).reshape(squares)
        across = torch.arange(columns)[None].expand(rows, columns).reshape(squares)
        first, second = (place.transpose(1, 2).flatten().repeat(frames) for place in (down, across))
        return first, second

    def encode(
        self, x: Tensor, grid: tuple[int, int, int], angles: Tensor
    ) -> Generator[None, None, Embeddings]:
        """Compute the blocks and the merger: patches [n, C] -> embeddings."""
        frames, rows, columns = grid
        metadata = sequences([rows * columns] * frames, self.device)
        for block in self.blocks:
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, metadata, angles)
        return Embeddings((yield from self.merger.slices(x)))


class Qwen25VLTower(QwenVLTower):
    """Qwen2.5-VL: gated MLPs, and windows of patches in all but a few layers."""

    kind = "rms"

    def block_shape(self, eyes: JsonObject) -> BlockShape:
        size, heads = eyes.integer("hidden_size", 1280), eyes.integer("num_heads", 16)
        return BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=eyes.integer("intermediate_size", 3420),
            eps=_EPS,
            activate=activation_of(eyes, "hidden_act", "silu"),
            gated=eyes.choice("hidden_act", ("silu", "gelu"), "silu"),
            norm="rms",
            norms=("norm1", "norm2"),
            qkv=qkv_of(eyes),
            out="attn.proj",
            mlp=("mlp.gate_up_proj", "mlp.down_proj"),
        )

    def build(self, eyes: JsonObject) -> None:
        self.window = eyes.integer("window_size", 112) // self.merge // self.patch_size
        self.whole_layers = tuple(eyes.get("fullatt_block_indexes") or (7, 15, 23, 31))

    def encode(
        self, x: Tensor, grid: tuple[int, int, int], angles: Tensor
    ) -> Generator[None, None, Embeddings]:
        frames, rows, columns = grid
        order, lengths = self.windows(frames, rows // self.merge, columns // self.merge)
        unit = self.merge**2
        patches = (order[:, None] * unit + torch.arange(unit)).flatten().to(self.device)
        x, angles = x.index_select(0, patches), angles.index_select(0, patches)
        whole = sequences([rows * columns] * frames, self.device)
        windows = sequences([length * unit for length in lengths], self.device)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            metadata: GroupMetadata = whole if number in self.whole_layers else windows
            x = yield from block.slices(x, metadata, angles)
        merged = yield from self.merger.slices(x)
        return Embeddings(merged.index_select(0, order.argsort().to(self.device)))

    def windows(self, frames: int, rows: int, columns: int) -> tuple[Tensor, list[int]]:
        """Return [m] squares in the order of their windows, and the number in each window."""
        numbers = torch.arange(frames * rows * columns).view(frames, rows, columns)
        found = [
            part.flatten()
            for frame in numbers
            for band in frame.split(self.window, 0)
            for part in band.split(self.window, 1)
        ]
        return torch.cat(found), [len(part) for part in found]


class Qwen3VLTower(QwenVLTower):
    """Qwen3-VL and 3.5: learned positions beside the rotary ones, and features of inner layers for DeepStack."""

    patch_bias = True
    usual_depth = 27
    merger_names = tuple(f"{_AT}.merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2"))  # type: ignore[assignment]

    def block_shape(self, eyes: JsonObject) -> BlockShape:
        size, heads = eyes.integer("hidden_size", 1152), eyes.integer("num_heads", 16)
        return BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=eyes.integer("intermediate_size", 4304),
            eps=_EPS,
            activate=activation_of(eyes, "hidden_act", "gelu_pytorch_tanh"),
            norms=("norm1", "norm2"),
            qkv=qkv_of(eyes),
            out="attn.proj",
            mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
        )

    def build(self, eyes: JsonObject) -> None:
        count = eyes.integer("num_position_embeddings", 2304)
        self.side = int(count**0.5)
        self.positions = LearnedTable(
            count, self.shape.channels, config=self.config, name=f"{_AT}.pos_embed", suffix=".weight"
        )
        self.deep_layers = tuple(eyes.get("deepstack_visual_indexes") or ())
        self.deep_mergers = nn.ModuleList(
            Merger(
                self,
                (f"{at}.norm", f"{at}.linear_fc1", f"{at}.linear_fc2"),
                self.shape.channels,
                self.merge**2,
                kind=self.kind,
                after=True,
            )
            for at in (f"{_AT}.deepstack_merger_list.{index}" for index in range(len(self.deep_layers)))
        )

    def encode(
        self, x: Tensor, grid: tuple[int, int, int], angles: Tensor
    ) -> Generator[None, None, Embeddings]:
        frames, rows, columns = grid
        x = x + self.interpolated(*grid)
        metadata = sequences([rows * columns] * frames, self.device)
        deep: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, metadata, angles)
            if number in self.deep_layers:
                merger = self.deep_mergers[self.deep_layers.index(number)]
                assert isinstance(merger, Merger)
                deep[number] = yield from merger.slices(x)
        return Embeddings(
            (yield from self.merger.slices(x)), tuple(deep[number] for number in self.deep_layers)
        )

    def interpolated(self, frames: int, rows: int, columns: int) -> Tensor:
        """Return [n, C] position embeddings, interpolated between the four next ones of the table."""
        down, across = self.places(frames, rows, columns)
        first, second = (self._taps(*pair) for pair in ((down, rows), (across, columns)))
        total: Tensor | None = None
        for row, row_weight in first:
            for column, column_weight in second:
                table = self.positions.weight[(row * self.side + column).to(self.device)]
                part = table * (row_weight * column_weight)[:, None].to(table)
                total = part if total is None else total + part
        assert total is not None
        return total

    def _taps(self, places: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return the two rows of the table next to each place on a side of this size, with their weights."""
        at = places.float() * (self.side - 1) / max(size - 1, 1)
        low = at.floor()
        return [
            ((low.long() + step).clamp(max=self.side - 1), (1 - (at - low - step).abs()).clamp(min=0))
            for step in (0, 1)
        ]
