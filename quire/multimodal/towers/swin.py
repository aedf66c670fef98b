# SPDX-License-Identifier: Apache-2.0
"""Image encoder of Donut (Kim et al., 2021, arXiv:2111.15664): a Swin transformer (Liu et al., 2021, arXiv:2103.14030).

Patches attend within windows, which every second block moves by half a window, and each stage but the last merges
squares of two by two patches.

Shapes: n patches of rows x columns, C channels, h heads of size D, W patches of a window, N windows.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import LayerNorm
from quire.models.json_object import JsonObject
from quire.models.vision_rows import grids, image_size, patch_size
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Slices,
    Tower,
    activation_of,
    chunks,
    merged_squares,
    sequences,
)
from quire.worker.media_rows import Embeddings

_APART = -100.0
"""Added to scores of patches that only the moving of windows has made neighbors."""
_NORM_EPS = 1e-5  # Of norms outside blocks, whatever the config says.
_UNIT = 8  # Of which a head's size is a multiple in the kernels.


@dataclass(frozen=True)
class SwinStage:
    """Shape of a stage's blocks: grid of patches, C, h, inner size of MLPs, side of windows."""

    grid: tuple[int, int]
    channels: int
    heads: int
    inner: int
    window: int

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of whole windows."""
        rows, columns = (-(-side // self.window) * self.window for side in self.grid)
        return rows, columns


class SwinWindows(Module):
    """Order of a stage's patches by windows, with what is added to their scores.

    Args:
        shift: rows and columns by which the windows are moved.
    """

    order: Tensor
    apart: Tensor
    """[N, W, W]: 0, or `_APART`."""

    def __init__(self, stage: SwinStage, shift: int) -> None:
        super().__init__()
        (rows, columns), side = stage.padded, stage.window
        with torch.device("cpu"):
            places = torch.arange(rows * columns).view(rows, columns).roll((-shift, -shift), (0, 1))
            self.register_buffer("order", windows_of(places, side), persistent=False)
            regions = [_regions(length, side, shift) for length in (rows, columns)]
            own = windows_of(regions[0][:, None] * 3 + regions[1][None], side)
            differ = own[:, None, :] != own[:, :, None]
            self.register_buffer("apart", torch.where(differ, _APART, 0.0), persistent=False)


def windows_of(values: Tensor, side: int) -> Tensor:
    """[rows, columns] -> [N, W]."""
    rows, columns = (length // side for length in values.shape)
    return values.view(rows, side, columns, side).transpose(1, 2).reshape(rows * columns, side * side)


def _regions(length: int, side: int, shift: int) -> Tensor:
    """Return for each place along a moved axis which of three parts it belongs to; without a shift there is one."""
    places = torch.arange(length)
    return (places >= length - side).long() + (places >= length - shift).long() if shift else places * 0


class WindowBias(LearnedTable):
    """Learned offset of scores per head and difference of two places in a window: [(2 * side - 1)^2, h]."""

    places: Tensor

    def __init__(self, side: int, heads: int, *, config: EngineConfig, name: str) -> None:
        super().__init__((2 * side - 1) ** 2, heads, config=config, name=name)
        with torch.device("cpu"):
            row, column = (
                axis.flatten() for axis in torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij")
            )
            differences = [axis[:, None] - axis[None] + side - 1 for axis in (row, column)]
            found = differences[0] * (2 * side - 1) + differences[1]
            self.register_buffer("places", found, persistent=False)

    def of_heads(self) -> Tensor:
        """Return float32 [h, W, W], by query and key."""
        return self.weight.float()[self.places.to(self.weight.device)].permute(2, 0, 1).contiguous()


class SwinBlock(Module):
    """`x + attention(norm(x))` within windows, and then `x + mlp(norm(x))`."""

    def __init__(
        self, tower: SwinTower, stage: SwinStage, windows: SwinWindows, *, eps: float, bias: bool, at: str
    ) -> None:
        super().__init__()
        config, size = tower.config, stage.channels
        self.stage, self.windows, self.activate = stage, windows, tower.activate
        self.norm1 = _norm(config, size, f"{at}.layernorm_before", eps)
        self.norm2 = _norm(config, size, f"{at}.layernorm_after", eps)
        own = f"{at}.attention.self"
        self.qkv = QKVLinear(
            hidden_size=size,
            num_heads=stage.heads,
            num_kv_heads=stage.heads,
            head_dim=size // stage.heads,
            bias=bias,
            dtype=model_dtype(config),
            name=f"{own}.query_key_value",
        )
        self.bias = WindowBias(
            stage.window, stage.heads, config=config, name=f"{own}.relative_position_bias_table"
        )
        self.out = tower.linear(size, size, True, f"{at}.attention.output.dense")
        self.up = tower.linear(size, stage.inner, True, f"{at}.intermediate.dense")
        self.down = tower.linear(stage.inner, size, True, f"{at}.output.dense")

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """X [n, C] -> [n, C]."""
        attended = yield from self._attended(self._padded(self.norm1(x)))
        out = torch.empty_like(x)
        (rows, columns), width = self.stage.grid, self.stage.padded[1]
        attended = attended.view(-1, width, x.shape[1])[:rows, :columns].reshape(x.shape)
        for own in chunks(len(x), 2.0 * x.shape[1] * (x.shape[1] + 2 * self.stage.inner)):
            y = x[own] + self.out(attended[own], NO_STEP)
            inner = self.activate(self.up(self.norm2(y), NO_STEP))
            out[own] = y + self.down(inner, NO_STEP)
            yield
        return out

    def _padded(self, x: Tensor) -> Tensor:
        """Return the patches [n, C] with zeros behind each row and below the last one."""
        (rows, columns), padded = self.stage.grid, self.stage.padded
        if padded == self.stage.grid:
            return x
        picture = x.view(rows, columns, -1)
        return F.pad(picture, (0, 0, 0, padded[1] - columns, 0, padded[0] - rows)).flatten(0, 1)

    def _attended(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Attend within windows, some at a time: [n, C] of whole windows -> [n, C]."""
        out, order = torch.empty_like(x), self.windows.order.to(x.device)
        per_window, size = order.shape[1], x.shape[1]
        bias, apart = self.bias.of_heads(), self.windows.apart.to(x.device)
        flops = 2.0 * per_window * size * (3 * size + 2 * per_window)
        for own in chunks(len(order), flops, least=1):
            places = order[own].flatten()
            q, k, v = self.qkv.heads(x[places], NO_STEP)
            out[places] = attend(q, k, v, bias[None] + apart[own][:, None])
            yield
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention within windows with an offset of every score: [N * W, h, D] and float32 [N, h, W, W] -> [N * W, C].

    The offsets join the product of queries and keys: a query gets a 1 at its place in the window behind its D values,
    and a key the offsets of its column there. So the attention of all towers computes it.
    """
    windows, heads, places, _ = bias.shape
    size = q.shape[-1]
    wide = -(-(size + places) // _UNIT) * _UNIT
    scale: float = size**-0.5
    wide_q, wide_k, wide_v = (x.new_zeros(len(x), heads, wide) for x in (q, k, v))
    wide_q[..., :size], wide_k[..., :size], wide_v[..., :size] = q, k, v
    wide_q.view(windows, places, heads, wide)[..., size : size + places] = torch.eye(
        places, dtype=q.dtype, device=q.device
    )[None, :, None]
    of_keys = bias.permute(0, 3, 1, 2).reshape(windows * places, heads, places)
    wide_k[..., size : size + places] = (of_keys / scale).to(k.dtype)
    metadata = sequences([places] * windows, q.device)
    return ops.bidirectional_attention(wide_q, wide_k, wide_v, metadata, scale)[..., :size].flatten(1)


def _norm(config: EngineConfig, size: int, name: str, eps: float = _NORM_EPS) -> LayerNorm:
    return LayerNorm(size=size, eps=eps, dtype=activation_dtype(config), name=name)


class Merging(Module):
    """Squares of two by two patches, normed, through one matrix to twice the channels."""

    def __init__(self, tower: SwinTower, stage: SwinStage, at: str) -> None:
        super().__init__()
        self.grid, size = stage.grid, stage.channels
        self.norm = _norm(tower.config, 4 * size, f"{at}.norm")
        self.reduction = tower.linear(4 * size, 2 * size, False, f"{at}.reduction")

    def forward(self, x: Tensor) -> Tensor:
        """X [n, C] -> [n / 4, 2 C]; an odd side is completed with zeros."""
        rows, columns = self.grid
        picture = F.pad(x.view(rows, columns, -1), (0, 0, 0, columns % 2, 0, rows % 2))
        height, width, size = picture.shape
        squares = merged_squares(picture.reshape(height * width, size), height, width, 2)
        # The checkpoint's order of a square's patches is by columns.
        by_columns = squares.view(-1, 2, 2, size).transpose(1, 2).reshape(len(squares), 4 * size)
        merged: Tensor = self.reduction(self.norm(by_columns), NO_STEP)
        return merged


class SwinTower(Tower):
    """Donut's encoder, and a projection to the decoder's size if the sizes differ."""

    parts = ("encoder.", "enc_to_dec_proj.")
    unused = (r"\.relative_position_index$", r"^encoder\.(pooler|layernorm)\.", r"\.mask_token$")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        eyes = whole.child("encoder")
        eyes.only("use_absolute_embeddings", False)
        self.activate = activation_of(eyes, "hidden_act", "gelu")
        self.image, self.patch_sides = image_size(eyes), patch_size(eyes)
        stages = _stages(eyes)
        at, size = "encoder.embeddings", stages[0].channels
        self.patch = PatchLinear(
            patch=(eyes.integer("num_channels", 3), *self.patch_sides),
            outputs=size,
            bias=True,
            dtype=self.dtype,
            name=f"{at}.patch_embeddings.projection",
        )
        self.norm = _norm(config, size, f"{at}.norm")
        depths = list(map(int, eyes.numbers("depths")))
        self.steps = nn.ModuleList(self._steps(eyes, stages, depths))
        self.projection: Linear | None = None
        last = stages[-1].channels
        if last != config.arch.media_size:
            self.projection = self.linear(last, config.arch.media_size, True, "enc_to_dec_proj")

    def _steps(self, eyes: JsonObject, stages: list[SwinStage], depths: list[int]) -> list[Module]:
        """Return the blocks of all stages, with what merges patches between them."""
        found: list[Module] = []
        eps, bias = eyes.number("layer_norm_eps", 1e-5), eyes.flag("qkv_bias", True)
        for number, (stage, depth) in enumerate(zip(stages, depths, strict=True)):
            at = f"encoder.encoder.layers.{number}"
            half = stage.window // 2 if min(stage.grid) > stage.window else 0
            windows = [SwinWindows(stage, shift) for shift in (0, half)]
            found += [
                SwinBlock(self, stage, windows[block % 2], eps=eps, bias=bias, at=f"{at}.blocks.{block}")
                for block in range(depth)
            ]
            if stage is not stages[-1]:
                found.append(Merging(self, stage, f"{at}.downsample"))
        return found

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from `pixel_values` [1, 3, height, width]."""
        x = self.norm(self.patch(self._patches(self.to_device(arrays["pixel_values"])), NO_STEP))
        yield
        for step in self.steps:
            if isinstance(step, SwinBlock):
                x = yield from step.slices(x)
            else:
                x = step(x)
                yield
        return Embeddings(x if self.projection is None else self.projection(x, NO_STEP))

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return the flattened patches [n, K] of an image; zeros complete the last ones."""
        height, width = self.patch_sides
        pixels = F.pad(pixels, (0, -pixels.shape[-1] % width, 0, -pixels.shape[-2] % height))
        _, colors, rows, columns = pixels.shape
        split = pixels.view(colors, rows // height, height, columns // width, width)
        return split.permute(1, 3, 0, 2, 4).reshape(-1, colors * height * width)


def _stages(eyes: JsonObject) -> list[SwinStage]:
    """Return the shapes of all stages.

    Raises:
        UnsupportedModelError: a stage has fewer patches than a window.
    """
    heads, first = eyes.numbers("num_heads"), eyes.integer("embed_dim", 96)
    ratio, window = eyes.number("mlp_ratio", 4.0), eyes.integer("window_size", 7)
    found = []
    for number, (grid, count) in enumerate(zip(grids(eyes), heads, strict=True)):
        if min(grid) < window:
            raise UnsupportedModelError(
                f"{eyes.where}: window_size is {window}, but a stage has {grid[0]} x {grid[1]} patches; an image must "
                "have a whole window in every stage"
            )
        size = first * 2**number
        found.append(SwinStage(grid, size, int(count), int(size * ratio), window))
    return found
