# SPDX-License-Identifier: Apache-2.0
"""Pixtral and Mistral 3: images of any size in rows of patches; a token ends each row, another one the image.

Paper: Pixtral 12B (2410.07073).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
    one_image,
    pixels_of,
    resample_of,
    resized,
    side_of,
    size_of,
    table_of,
)


class PixtralProcessor(FilesProcessor):
    """Processor that shrinks the longer side to a limit and rounds both up to whole merged patches."""

    OPTIONS = frozenset({"size"})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        self._image = image
        image.only("do_resize", True)
        image.only("do_center_crop", False)
        self._table = table_of(image, CLIP_MEAN, CLIP_STD)
        self._resample = resample_of(image, BICUBIC)
        patch = files.processor.integer("patch_size", files.vision.integer("patch_size", 16))
        merge = files.processor.integer("spatial_merge_size", files.config.integer("spatial_merge_size", 1))
        self._patch = patch * merge
        _limits(image)
        self.placeholder = self.marker = files.token("image_token", "[IMG]")
        self._row_end = files.token("image_break_token", "[IMG_BREAK]")
        self._image_end = files.token("image_end_token", "[IMG_END]")
        self.literals = (self.placeholder, self._row_end, self._image_end)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            limits = _limits(request_options(self._image, options))
        rows, columns = (-(-side // self._patch) for side in _shrunk(size_of(image), limits))
        size = rows * self._patch, columns * self._patch
        check_prepared_pixels(size[0] * size[1])
        pixels = pixels_of(resized(as_rgb(image), size, self._resample))
        row = ((self.placeholder, columns), (self._row_end, 1))
        tokens = (*row * (rows - 1), (self.placeholder, columns), (self._image_end, 1))
        grid = (1, rows, columns)
        return Prepared({PIXELS: pixels, TABLE: self._table}, self.placeholder, (Placeholders(tokens),), grid)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return {**one_image(arrays), "image_sizes": np.array([arrays[PIXELS].shape[:2]], np.int64)}


def _limits(image: JsonObject) -> Size:
    """Return the largest (height, width)."""
    sides = image.child("size") if not isinstance(image.get("size"), int) else None
    if sides is not None and "height" in sides:
        return sides.integer("height"), sides.integer("width")
    return (side_of(image, "size", "longest_edge", 1024),) * 2


def _shrunk(size: Size, limits: Size) -> Size:
    ratio = max(size[0] / limits[0], size[1] / limits[1])
    height, width = (math.floor(side / ratio) if ratio > 1 else side for side in size)
    return max(height, 1), max(width, 1)
