# SPDX-License-Identifier: Apache-2.0
"""Towers of LLaVA-NeXT (2024) and LLaVA-OneVision (Li et al., 2024, arXiv:2408.03326): features of tiles, put together.

Shapes: t tiles or frames of n patches, m embeddings, H hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.json_object import JsonObject
from quire.multimodal.processors.anyres import (
    best_resolution,
    most_tiles,
    pinpoints_of,
    shown_grid,
    shrunk,
    unpadded,
)
from quire.multimodal.processors.base import Size
from quire.multimodal.processors.llava_next import NEXT_PINPOINTS, ONEVISION_PINPOINTS, SIZES
from quire.multimodal.towers.base import Arrays, LearnedTable, Slices
from quire.multimodal.towers.vit import LlavaTower
from quire.worker.media_rows import Embeddings


class LlavaNextTower(LlavaTower):
    """LLaVA-NeXT: features of the whole image, and then of its tiles, in rows that end with a line break."""

    parts = ("vision_tower.", "multi_modal_projector.", "image_newline")
    usual_pinpoints: tuple[Size, ...] = NEXT_PINPOINTS

    def build(self, whole: JsonObject) -> None:
        super().build(whole)
        self.pinpoints = pinpoints_of(whole, self.usual_pinpoints)
        self.tiles = self.most_tiles(whole)
        self.image_side = self.eyes.integer("image_size", self.vision.side * self.vision.patch_size)
        self.newline = LearnedTable(self.hidden_size, config=self.config, name="image_newline")

    def most_tiles(self, whole: JsonObject) -> int | None:
        """Return the number of tiles whose features an image may have; None: any number."""
        return None

    def slices(self, arrays: Arrays) -> Slices:
        pixels = self.to_device(arrays["pixel_values"]).flatten(0, 1)
        height, width = (int(side) for side in arrays[SIZES].reshape(-1))
        hidden = yield from self.vision.slices(pixels)
        tiles = []
        for tile in hidden:
            tiles.append(self.project(tile[None]))
            yield
        return Embeddings(torch.cat((tiles[0], self._rows(torch.stack(tiles[1:]), (height, width)))))

    def _rows(self, tiles: Tensor, size: Size) -> Tensor:
        """Return the features of tiles [t, n, H] as one image of this size, each row with its line break."""
        side, target = self.vision.side, best_resolution(size, self.pinpoints)
        down, across = (length // self.image_side for length in target)
        whole = tiles.view(down, across, side, side, -1).transpose(1, 2)
        whole = whole.reshape(down * side, across * side, -1)
        top, left = unpadded(size, (down * side, across * side))
        shown = shown_grid(size, (down * side, across * side))
        rows = whole[top : top + shown[0], left : left + shown[1]]
        if (smaller := shrunk(shown, self.tiles, side)) != shown:
            rows = resized(rows[None], smaller)[0]
        breaks = self.newline.weight.to(rows.dtype).expand(len(rows), 1, -1)
        return torch.cat((rows, breaks), 1).flatten(0, 1)


class LlavaOnevisionTower(LlavaNextTower):
    """LLaVA-OneVision: images with the features of some tiles at most, and videos of pooled frames."""

    usual_pinpoints = ONEVISION_PINPOINTS

    def most_tiles(self, whole: JsonObject) -> int | None:
        return most_tiles(whole)

    def slices(self, arrays: Arrays) -> Slices:
        if "pixel_values_videos" not in arrays:
            return (yield from super().slices(arrays))
        side = self.vision.side
        pooled = []
        hidden = yield from self.vision.slices(self.to_device(arrays["pixel_values_videos"]).flatten(0, 1))
        for frame in hidden:
            features = self.project(frame[None]).view(1, side, side, -1)
            pooled.append(resized(features, (math.ceil(side / 2),) * 2).flatten(0, 2))
            yield
        return Embeddings(torch.cat((*pooled, self.newline.weight.to(pooled[0].dtype)[None])))


def resized(features: Tensor, size: Size) -> Tensor:
    """Return features [t, rows, columns, H] in another size, each between its four neighbors."""
    found = F.interpolate(features.permute(0, 3, 1, 2), size=size, mode="bilinear")
    return found.permute(0, 2, 3, 1)
