# SPDX-License-Identifier: Apache-2.0
"""Pixtral's tower (2024, arXiv:2410.07073): patches of any image size with 2-D rotary positions.

It is the tower of Mistral 3 as well, which merges squares of patches.

Shapes: n patches of an image, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.layers.base import activation_dtype
from quire.layers.norm import RMSNorm
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    activation_of,
    merged_squares,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock
from quire.multimodal.towers.vit import feature_layers
from quire.worker.media_rows import Embeddings


class PixtralTower(Tower):
    """Patches with 2-D rotary positions, through two linear layers (`LlavaForConditionalGeneration`)."""

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        eyes, at = whole.child("vision_config"), "vision_tower"
        size = self.channels = eyes.integer("hidden_size", 1024)
        heads, depth = eyes.integer("num_attention_heads", 16), eyes.integer("num_hidden_layers", 24)
        self.patch_size = eyes.integer("patch_size", 16)
        self.head_dim = eyes.integer("head_dim", size // heads)
        self.theta = self._theta(eyes)
        self.patch = PatchLinear(
            patch=(eyes.integer("num_channels", 3), self.patch_size, self.patch_size),
            outputs=size,
            bias=False,
            dtype=self.dtype,
            name=f"{at}.patch_conv",
        )
        self.pre_norm = RMSNorm(size=size, eps=1e-5, dtype=activation_dtype(config), name=f"{at}.ln_pre")
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=self.head_dim,
            inner=eyes.integer("intermediate_size", 4096),
            eps=1e-5,
            activate=activation_of(eyes, "hidden_act", "silu"),
            norm="rms",
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            gated=eyes.choice("hidden_act", ("silu", "gelu"), "silu"),
            norms=("attention_norm", "ffn_norm"),
            qkv="attention.qkv_proj",
            out="attention.o_proj",
            mlp=("feed_forward.gate_up_proj", "feed_forward.down_proj"),
        )
        reads = feature_layers(whole, -1)
        self.reads = tuple(depth + 1 + read if read < 0 else read for read in reads)
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{at}.transformer.layers.{number}")
            for number in range(max(self.reads))
        )
        unread = "|".join(str(number) for number in range(max(self.reads), depth))
        self.unused = (rf"^{at}\.transformer\.layers\.({unread})\.",) if unread else ()
        self.build(whole)

    @staticmethod
    def _theta(eyes: JsonObject) -> float:
        return eyes.child("rope_parameters").number("rope_theta", eyes.number("rope_theta", 10000.0))

    def build(self, whole: JsonObject) -> None:
        """Make the projection."""
        strategy = whole.choice("vision_feature_select_strategy", ("full",), "full")
        assert strategy == "full", "there is no class token to drop"
        bias = whole.flag("multimodal_projector_bias", True)
        self.projection = self.two_layers(whole, bias)

    def two_layers(self, whole: JsonObject, bias: bool) -> Projection:
        """Return the linear layers of the projection."""
        return Projection(
            self.linear(
                self.channels * len(self.reads), self.hidden_size, bias, "multi_modal_projector.linear_1"
            ),
            self.linear(self.hidden_size, self.hidden_size, bias, "multi_modal_projector.linear_2"),
            activation_of(whole, "projector_hidden_act", "gelu"),
        )

    def project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Hidden states [rows * columns, C] -> embeddings [m, H]."""
        out: Tensor = self.projection(x)
        return out

    def slices(self, arrays: Arrays) -> Slices:
        height, width = (int(size) for size in arrays["image_sizes"].reshape(-1)[:2])
        size, pixels = self.patch_size, self.to_device(arrays["pixel_values"])
        rows, columns = height // size, width // size
        if not rows or not columns:
            raise ValidationError(f"an image of {height} x {width} pixels has no patch of {size}")
        pixels = pixels[0, :, : rows * size, : columns * size]
        patches = pixels.reshape(-1, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        x = self.pre_norm(self.patch(patches.reshape(rows * columns, -1), NO_STEP))
        yield
        down = torch.arange(rows).repeat_interleave(columns)
        across = torch.arange(columns).repeat(rows)
        angles = self.angles(down, across).to(self.device)
        metadata = sequences([len(x)], self.device)
        found = {0: x}
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, TowerBlock)
            x = found[number] = yield from block.slices(x, metadata, angles)
            if number - 1 not in self.reads:
                del found[number - 1]
        return Embeddings(self.project(torch.cat([found[read] for read in self.reads], 1), rows, columns))

    def angles(self, down: Tensor, across: Tensor) -> Tensor:
        """Return cosines and sines [n, D]: rows have every other frequency from the first on, columns the rest."""
        frequencies = 1.0 / (self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        angles = torch.cat(
            (down.float()[:, None] * frequencies[::2], across.float()[:, None] * frequencies[1::2]), 1
        )
        return torch.cat((angles.cos(), angles.sin()), 1)


class Mistral3Tower(PixtralTower):
    """Pixtral's patches, normed and merged by squares, through two linear layers."""

    def build(self, whole: JsonObject) -> None:
        at, size = "multi_modal_projector", self.channels
        self.square = whole.integer("spatial_merge_size", 2)
        text = whole.child("text_config")
        self.norm = RMSNorm(
            size=size,
            eps=text.number("rms_norm_eps", 1e-6),
            dtype=activation_dtype(self.config),
            name=f"{at}.norm",
        )
        self.merger = self.linear(size * self.square**2, size, False, f"{at}.patch_merger.merging_layer")
        self.projection = self.two_layers(whole, whole.flag("multimodal_projector_bias", False))

    def project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        squares = merged_squares(self.norm(x), rows, columns, self.square, channels_first=True)
        out: Tensor = self.projection(self.merger(squares, NO_STEP))
        return out
