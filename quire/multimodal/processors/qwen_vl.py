# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images of any size in patches, two frames to a patch.

Paper: Qwen2-VL (2409.12191). Sides are rounded to multiples of a merged patch, with the number of pixels within limits.
A still image is the same frame twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import (
    Arrays,
    Placeholders,
    Prepared,
    Size,
    check_prepared_pixels,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
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
    table_of,
)

MAX_RATIO = 200
PATCH = (
    "patch"  # Name of an array: int64 [3], sides of a patch, of a merged patch in patches, frames of a patch.
)
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class QwenVLProcessor(FilesProcessor):
    """Processor that rounds both sides to multiples of `patch_size * merge_size`."""

    OPTIONS = frozenset({"min_pixels", "max_pixels", "size"})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        self._image = image
        self._table = table_of(image, CLIP_MEAN, CLIP_STD)
        self._resample = resample_of(image, BICUBIC)
        image.only("do_resize", True)
        self._patch = image.integer("patch_size", 14)
        self._merge = image.integer("merge_size", 2)
        self._frames = image.integer("temporal_patch_size", 2)
        _limits(image)
        self.placeholder = self.marker = files.token("image_token", "<|image_pad|>")
        self.literals = (
            self.placeholder,
            files.token("video_token", "<|video_pad|>"),
            files.token("vision_start_token", "<|vision_start|>"),
            files.token("vision_end_token", "<|vision_end|>"),
        )

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            limits = _limits(request_options(self._image, options))
        size = rounded_size(size_of(image), self._patch * self._merge, *limits)
        check_prepared_pixels(size[0] * size[1])
        pixels = pixels_of(resized(as_rgb(image), size, self._resample))
        patch = np.array([self._patch, self._merge, self._frames], np.int64)
        rows, columns = (side // (self._patch * self._merge) for side in size)
        return Prepared(
            {PIXELS: pixels, TABLE: self._table, PATCH: patch},
            self.placeholder,
            (Placeholders(((self.placeholder, rows * columns),)),),
            grid=(1, rows, columns),
        )

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the patches of an image, or of the frames of a video, in squares that are merged."""
        is_video = arrays[PIXELS].ndim == 4
        values = channels_first(arrays)
        patch, merge, each = (int(value) for value in arrays[PATCH])
        if is_video:
            values = np.concatenate([values, values[-1:].repeat(-len(values) % each, 0)])
        else:
            values = np.broadcast_to(values, (each, *values.shape))
        frames = len(values) // each
        rows, columns = (side // patch for side in values.shape[2:])
        blocks = values.reshape(frames, each, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        blocks = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        name, grid = (
            ("pixel_values_videos", "video_grid_thw") if is_video else ("pixel_values", "image_grid_thw")
        )
        return {
            name: blocks.reshape(frames * rows * columns, 3 * each * patch * patch),
            grid: np.array([[frames, rows, columns]], np.int64),
        }


def _limits(image: JsonObject) -> tuple[int, int]:
    """Return the least and most pixels, from `size` or the keys of older files."""
    size = image.child("size")
    least = size.integer("shortest_edge", size.integer("min_pixels", MIN_PIXELS))
    most = size.integer("longest_edge", size.integer("max_pixels", MAX_PIXELS))
    least, most = image.integer("min_pixels", least), image.integer("max_pixels", most)
    if least > most:
        raise image.wrong("min_pixels", f"at most max_pixels, which is {most}")
    return least, most


def rounded_size(size: Size, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return (height, width) in multiples of `factor` whose product is within the limits, in about the same proportion.

    Raises:
        ValidationError: one side is too long for the other.
    """
    if max(size) / min(size) > MAX_RATIO:
        raise ValidationError(
            f"the image is {size[1]} x {size[0]} pixels; this model takes images with one side at most {MAX_RATIO} "
            "times the other",
            param="messages",
        )
    height, width = (round(side / factor) * factor for side in size)
    area = size[0] * size[1]
    if height * width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        height, width = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        height, width = (math.ceil(side * grow / factor) * factor for side in size)
    return height, width
