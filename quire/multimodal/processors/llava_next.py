# SPDX-License-Identifier: Apache-2.0
"""LLaVA-NeXT and LLaVA-OneVision: the whole image, and its tiles in the resolution that fits best.

Papers: LLaVA-NeXT (2024), LLaVA-OneVision (2408.03326). The features of the tiles are put together, those of padding
left out, and each row ends with a learned line break. A video is a run over pooled features of its frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.models.json_object import JsonObject
from quire.multimodal.processors.anyres import (
    best_resolution,
    fitted,
    most_tiles,
    pinpoints_of,
    shown_grid,
    shrunk,
)
from quire.multimodal.processors.base import Arrays, Placeholders, Prepared, Size, check_prepared_pixels
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
from quire.multimodal.processors.llava import num_embeddings
from quire.multimodal.processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    PIXELS,
    TABLE,
    as_rgb,
    channels_first,
    pixels_of,
    resample_of,
    resized,
    size_of,
    square_of,
    table_of,
)
from quire.multimodal.processors.video import Clip, ResizedVideos, VideoFacts, counts_of, too_short

NEXT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_SIDES = range(384, 2305, 384)
ONEVISION_PINPOINTS: tuple[Size, ...] = tuple(product(_SIDES, _SIDES))
SIZES = "image_sizes"
ENCODED_FRAMES = (
    32  # Of a file, where neither the checkpoint nor the request says, as in the model's training.
)


class LlavaNextProcessor(FilesProcessor):
    """Processor of images in tiles."""

    OPTIONS = frozenset[str]()
    mean, std = CLIP_MEAN, CLIP_STD
    usual_side = 336
    usual_pinpoints: tuple[Size, ...] = NEXT_PINPOINTS

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        image.only("do_resize", True)
        self._table = table_of(image, self.mean, self.std)
        self._resample = resample_of(image, BICUBIC)
        self._side = _side_of(image, self.usual_side)
        self._pinpoints = pinpoints_of(image, self.usual_pinpoints)
        for pinpoint in self._pinpoints:
            if pinpoint[0] % self._side or pinpoint[1] % self._side:
                raise image.wrong("image_grid_pinpoints", f"multiples of the tile, {self._side}")
        vision = files.vision
        self._patches = vision.integer("image_size", self.usual_side) // vision.integer("patch_size", 14)
        self._base = num_embeddings(files)
        self._tiles = self._most_tiles(files.config)
        self.placeholder = self.marker = files.token("image_token", "<image>")
        self.literals = (self.placeholder,)

    def _most_tiles(self, config: JsonObject) -> int | None:
        return None

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        size, side = size_of(image), self._side
        target = best_resolution(size, self._pinpoints)
        check_prepared_pixels(target[0] * target[1] + side * side)
        image = as_rgb(image)
        whole = pixels_of(resized(image, (side, side), self._resample))
        tiles = np.stack([whole, *self._tiled(image, target)])
        arrays = {PIXELS: tiles, TABLE: self._table, SIZES: np.array([size], np.int64)}
        count = self._base + self._num_features(size, target)
        return Prepared(arrays, self.placeholder, (Placeholders(((self.placeholder, count),)),))

    def _tiled(self, image: Image.Image, target: Size) -> list[NDArray[np.uint8]]:
        """Return the tiles [side, side, 3] of an image in the middle of the target, row by row."""
        height, width = fitted(size_of(image), target)
        canvas = np.zeros((*target, 3), np.uint8)
        top, left = (target[0] - height) // 2, (target[1] - width) // 2
        shown = pixels_of(resized(image, (height, width), self._resample))
        canvas[top : top + height, left : left + width] = shown
        side = self._side
        rows, columns = target[0] // side, target[1] // side
        return list(canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3))

    def _num_features(self, size: Size, target: Size) -> int:
        """Return the features of the tiles, with the line breaks."""
        patches = self._patches
        grid = (target[0] // self._side * patches, target[1] // self._side * patches)
        rows, columns = shrunk(shown_grid(size, grid), self._tiles, patches)
        return rows * columns + rows

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the tiles of an image, or the frames of a video, in a batch of one."""
        values = channels_first(arrays)[None]
        return (
            {"pixel_values": values, SIZES: arrays[SIZES]}
            if SIZES in arrays
            else {"pixel_values_videos": values}
        )


class LlavaOnevisionProcessor(LlavaNextProcessor):
    """Processor of LLaVA-OneVision, whose images have the features of 9 tiles at most."""

    usual_side = 384
    usual_pinpoints = ONEVISION_PINPOINTS

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.videos = LlavaOnevisionVideos(files, self._patches)

    def _most_tiles(self, config: JsonObject) -> int | None:
        return most_tiles(config)


class LlavaOnevisionVideos(ResizedVideos):
    """Processor of frames that are squares, each pooled to a quarter of its features.

    Args:
        patches: along a side of a frame.
    """

    usual_token = "<video>"

    def __init__(self, files: ProcessorFiles, patches: int) -> None:
        super().__init__(files, CLIP_MEAN, CLIP_STD, BICUBIC)
        self._each = ((patches + 1) // 2) ** 2

    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        count, fps = counts_of(video)
        total = facts.num_frames
        if count is not None and count > total:
            raise too_short(count, facts)
        if count is None and fps is not None and facts.fps:
            count = max(1, int(total / facts.fps * fps))
        elif count is None and facts.is_encoded:
            count = min(ENCODED_FRAMES, total)
        count = total if count is None else min(count, total)
        return [index * total // count for index in range(count)]

    def _size(self, clip: Clip, video: JsonObject) -> Size:
        return square_of(video, "size", 384)

    def _prepared(self, clip: Clip, pixels: NDArray[np.uint8], video: JsonObject) -> Prepared:
        count = len(pixels) * self._each + 1
        runs = (Placeholders(((self.placeholder, count),)),)
        return Prepared({PIXELS: pixels, TABLE: self._table}, self.placeholder, runs)


def _side_of(image: JsonObject, usual: int) -> int:
    """Return the side of a tile, to which all steps of the image processor must resize and crop.

    Raises:
        StartupError: they do not agree on one.
    """
    if isinstance(image.get("size"), dict) and "shortest_edge" in image.child("size"):
        sides = (image.child("size").integer("shortest_edge"),) * 2
    else:
        sides = square_of(image, "size", usual)
    crop = square_of(image, "crop_size", sides[0]) if image.get("crop_size") is not None else sides
    if len({*sides, *crop}) != 1:
        raise image.unsupported("size", "one side, for tiles and for the crop of each")
    return sides[0]
