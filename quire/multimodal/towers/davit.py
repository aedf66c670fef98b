# SPDX-License-Identifier: Apache-2.0
"""Encoder of Florence-2 (Xiao et al., 2023, arXiv:2311.06242): BART's, over the rows of an image and then a text.

The image's rows are those of DaViT (Ding et al., 2022, arXiv:2204.03645), whose blocks attend within windows of patches
and then between channels.

Shapes: n patches of rows x columns, C channels in g groups of D.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.norm import LayerNorm
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    TOKEN_IDS,
    Arrays,
    LearnedTable,
    PatchLinear,
    Slices,
    activation_of,
    sequences,
)
from quire.multimodal.towers.swin import windows_of
from quire.multimodal.towers.text import BartTower

_TAPS = 3
PIXELS = "pixel_values"


class FlorenceTower(BartTower):
    """DaViT, its projection, and BART's encoder."""

    parts = ("encoder.", "vision_tower.", "multi_modal_projector.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config, whole=whole.child("text_config"))
        self.unused = (*self.unused, r"pos_idx_to_embed$")
        self.image_token = whole.integer("image_token_id", 51289)
        eyes = whole.child("vision_config")
        self.stages = nn.ModuleList(_stages(self, eyes))
        at, size = "multi_modal_projector", int(eyes.numbers("embed_dim")[-1])
        count = eyes.integer("max_position_embeddings", 50)
        self.rows, self.columns = (
            LearnedTable(
                count,
                width,
                config=config,
                name=f"{at}.image_position_embed.{axis}_embeddings",
                suffix=".weight",
            )
            for axis, width in (("row", size // 2), ("column", size - size // 2))
        )
        self.projection = self.linear(size, self.hidden_size, False, f"{at}.image_projection")
        self.projection_norm = _norm(self, self.hidden_size, f"{at}.image_proj_norm")

    def joins(self, token_ids: Sequence[int]) -> bool:
        """See `Tower.joins`."""
        return self.image_token not in token_ids and super().joins(token_ids)

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [E, C] from `token_ids` [E], and perhaps `pixel_values` [1, 3, height, width]."""
        rows: Tensor | None = None
        if PIXELS in arrays:
            rows = yield from self._image(self.to_device(arrays[PIXELS])[0])
        self._check_places(arrays, rows)
        return (yield from self.slices_of(arrays, rows))

    def token_rows(self, ids: Tensor, image: Tensor | None) -> Tensor:
        """See `TextTower.token_rows`."""
        found = super().token_rows(ids, None)
        if image is not None:
            found[ids == self.image_token] = image.to(found.dtype)
        return found

    def _check_places(self, arrays: Arrays, rows: Tensor | None) -> None:
        wanted, places = (
            (0 if rows is None else len(rows)),
            int((arrays[TOKEN_IDS] == self.image_token).sum()),
        )
        if wanted != places:
            raise ValidationError(f"an image has {wanted} rows, and the text has {places} places for them")

    def _image(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Compute the rows [m, H] of an image [3, height, width]: their mean first."""
        x = pixels.permute(1, 2, 0)
        for stage in self.stages:
            assert isinstance(stage, DaViTStage)
            x = yield from stage.slices(x)
        rows, columns, size = x.shape
        if max(rows, columns) > len(self.rows.weight):
            raise ValidationError(
                f"an image has {rows} x {columns} patches, the limit is {len(self.rows.weight)}"
            )
        along = self.columns.weight[None, :columns].expand(rows, -1, -1)
        down = self.rows.weight[:rows, None].expand(-1, columns, -1)
        first_frame = torch.arange(size, device=x.device) % 2  # sine and cosine of 0
        found = (x + torch.cat((along, down), -1) + first_frame).view(-1, size)
        found = torch.cat((found.mean(0, keepdim=True), found))
        projected: Tensor = self.projection_norm(self.projection(found, NO_STEP))
        return projected


class DaViTStage(Module):
    """Overlapping patches of the stage before, and blocks."""

    def __init__(self, tower: FlorenceTower, eyes: JsonObject, number: int) -> None:
        super().__init__()
        sizes = [int(size) for size in eyes.numbers("embed_dim")]
        self.size = sizes[number]
        colors = sizes[number - 1] if number else eyes.integer("in_channels", 3)
        self.patch, self.stride, self.padding = (
            int(eyes.numbers(key)[number]) for key in ("patch_size", "patch_stride", "patch_padding")
        )
        self.norms_before = bool(eyes.get("patch_prenorm")[number])
        at = f"vision_tower.convs.{number}"
        self.norm = _norm(tower, colors if self.norms_before else self.size, f"{at}.norm")
        self.conv = PatchLinear(
            patch=(colors, self.patch, self.patch),
            outputs=self.size,
            bias=True,
            dtype=tower.dtype,
            name=f"{at}.conv",
        )
        self.blocks = nn.ModuleList(
            kind(tower, eyes, number, f"vision_tower.blocks.{number}.{block}.{name}")
            for block in range(int(eyes.numbers("depths")[number]))
            for kind, name in ((SpatialBlock, "spatial_block"), (ChannelBlock, "channel_block"))
        )

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """[rows, columns, K] -> [rows, columns, C] of this stage."""
        if self.norms_before:
            x = self.norm(x.flatten(0, 1).contiguous()).view(x.shape)
        rows, columns = ((side + 2 * self.padding - self.patch) // self.stride + 1 for side in x.shape[:2])
        patches = F.unfold(x.permute(2, 0, 1)[None], self.patch, padding=self.padding, stride=self.stride)
        found: Tensor = self.conv(patches[0].t().contiguous(), NO_STEP)
        yield
        x = (found if self.norms_before else self.norm(found)).view(rows, columns, self.size)
        for block in self.blocks:
            assert isinstance(block, DaViTBlock)
            x = yield from block.slices(x)
        return x


class Depthwise(Module):
    """Convolution of 3 x 3 patches of each channel by itself, added to its input."""

    def __init__(self, tower: FlorenceTower, size: int, at: str) -> None:
        super().__init__()
        config, stored = tower.config, (size, 1, _TAPS, _TAPS)
        self.weight = LearnedTable(size, _TAPS**2, config=config, name=at, suffix=".weight", stored=stored)
        self.bias = LearnedTable(size, config=config, name=at, suffix=".bias")

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, columns, C] -> the same shape."""
        rows, columns, _ = x.shape
        padded, taps = F.pad(x, (0, 0, 1, 1, 1, 1)), self.weight.weight
        out = x + self.bias.weight
        for tap in range(_TAPS**2):
            row, column = divmod(tap, _TAPS)
            out = out + padded[row : row + rows, column : column + columns] * taps[:, tap]
        return out


class DaViTBlock(Module):
    """Two sums, each of a depthwise convolution and of what follows a norm: attention, and an MLP."""

    attention_name = ""

    def __init__(self, tower: FlorenceTower, eyes: JsonObject, number: int, at: str) -> None:
        super().__init__()
        size = int(eyes.numbers("embed_dim")[number])
        inner = int(size * eyes.number("mlp_ratio", 4.0))
        self.convs = nn.ModuleList(Depthwise(tower, size, f"{at}.conv{each}") for each in (1, 2))
        self.norms = nn.ModuleList(_norm(tower, size, f"{at}.norm{each}") for each in (1, 2))
        own = f"{at}.{self.attention_name}"
        self.qkv = tower.linear(size, 3 * size, eyes.flag("qkv_bias", True), f"{own}.qkv")
        self.out = tower.linear(size, size, True, f"{own}.proj")
        self.up = tower.linear(size, inner, True, f"{at}.ffn.fc1")
        self.down = tower.linear(inner, size, True, f"{at}.ffn.fc2")
        self.activate = activation_of(eyes, "activation_function", "gelu")
        self.heads = int(eyes.numbers("num_heads")[number])
        self.groups = int(eyes.numbers("num_groups")[number])
        self.window = eyes.integer("window_size", 12)

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Compute x [rows, columns, C] -> the same shape."""
        shape, size = x.shape, x.shape[-1]
        x = self.convs[0](x)
        yield
        normed = self.norms[0](x.reshape(-1, size)).view(shape)
        x = x + self.attend(normed)
        yield
        x = self.convs[1](x)
        normed = self.norms[1](x.reshape(-1, size))
        yield
        x = x + self.down(self.activate(self.up(normed, NO_STEP)), NO_STEP).view(shape)
        yield
        return x

    def attend(self, x: Tensor) -> Tensor:
        """X [rows, columns, C] -> the same shape."""
        raise NotImplementedError


class SpatialBlock(DaViTBlock):
    """Block whose patches attend within windows; zeros complete the last ones."""

    attention_name = "window_attn"

    def attend(self, x: Tensor) -> Tensor:
        (rows, columns, size), side = x.shape, self.window
        padded = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        height, width = padded.shape[:2]
        order = windows_of(torch.arange(height * width, device=x.device).view(height, width), side)
        places = order.flatten()
        heads: Tensor = self.qkv(padded.view(-1, size)[places], NO_STEP)
        q, k, v = heads.view(len(places), 3, self.heads, -1).unbind(1)
        metadata = sequences([order.shape[1]] * len(order), x.device)
        found = ops.bidirectional_attention(q, k, v, metadata, q.shape[-1] ** -0.5)
        out = torch.empty(height * width, size, dtype=x.dtype, device=x.device)
        out[places] = self.out(found.flatten(1), NO_STEP)
        return out.view(height, width, size)[:rows, :columns]


class ChannelBlock(DaViTBlock):
    """Block whose channels attend to those of their group; no number of threads changes the order of sums."""

    attention_name = "channel_attn"

    def attend(self, x: Tensor) -> Tensor:
        heads: Tensor = self.qkv(x.reshape(-1, x.shape[-1]), NO_STEP)
        count = len(heads)
        split = heads.view(count, 3, self.groups, -1).permute(1, 2, 3, 0).contiguous()
        q, k, v = split.unbind(0)
        scores = torch.stack([(k * q[:, own, None]).sum(-1) for own in range(q.shape[1])], 1)
        shares = (scores * count**-0.5).softmax(-1)
        mixed = torch.zeros_like(v)
        for other in range(v.shape[1]):
            mixed = mixed + shares[:, :, other, None] * v[:, None, other]
        rows = mixed.permute(2, 0, 1).reshape(count, -1).contiguous()
        out: Tensor = self.out(rows, NO_STEP)
        return out.view(x.shape)


def _norm(tower: FlorenceTower, size: int, name: str) -> LayerNorm:
    return LayerNorm(size=size, eps=1e-5, dtype=activation_dtype(tower.config), name=name)


def _stages(tower: FlorenceTower, eyes: JsonObject) -> list[DaViTStage]:
    return [DaViTStage(tower, eyes, number) for number in range(len(eyes.numbers("embed_dim")))]
