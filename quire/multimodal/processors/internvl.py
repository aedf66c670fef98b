# SPDX-License-Identifier: Apache-2.0
"""InternVL 3 in transformers' layout: up to 12 tiles in the grid closest to the image's proportions, and a thumbnail.

Paper: InternVL3 (2504.10479).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import (
    OPTIONS_FIELD,
    Arrays,
    Placeholders,
    Prepared,
    Processor,
    Size,
    check_prepared_pixels,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import ProcessorFiles
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
    size_of,
    square_of,
    table_of,
)

MAX_TILES = 64
CUTTING = "crop_to_patches"


class InternVLProcessor(Processor):
    """Processor that resizes to a grid of tiles and cuts them.

    Tiles are cut unless the operator or the request says otherwise; the file's `crop_to_patches` is for the image
    processor alone, and transformers' processor overrides it, too.
    """

    OPTIONS = frozenset({CUTTING, "min_patches", "max_patches"})

    def __init__(self, files: ProcessorFiles, options: Mapping[str, Any]) -> None:
        image = files.image.with_values(**{CUTTING: options.get(CUTTING, True)})
        self._image = image
        image.only("do_resize", True)
        self._table = table_of(image, CLIP_MEAN, CLIP_STD)
        self._resample = resample_of(image, BICUBIC)
        self._tile = square_of(image, "size", 384)
        _tile_limits(image)
        self._count = files.processor.integer(
            "image_seq_length", files.config.integer("image_seq_length", 256)
        )
        self.placeholder = self.marker = files.token("context_image_token", "<IMG_CONTEXT>")
        first, last = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
        self.literals = (self.placeholder, first, last)
        self._text = f"{first}{self.placeholder}{last}"

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        return cls(ProcessorFiles(model_dir, options), options)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            least, most = _tile_limits(request_options(self._image, options))
        image = as_rgb(image)
        rows, columns = best_grid(size_of(image), self._tile, least, most)
        tiles = self._cut(image, rows, columns) if rows * columns > 1 else []
        pixels = np.stack([*tiles, pixels_of(resized(image, self._tile, self._resample))])
        run = Placeholders(((self.placeholder, self._count * len(pixels)),))
        return Prepared({PIXELS: pixels, TABLE: self._table}, self._text, (run,))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)

    def _cut(self, image: Image.Image, rows: int, columns: int) -> list[NDArray[np.uint8]]:
        height, width = self._tile
        check_prepared_pixels(height * rows * width * columns)
        pixels = pixels_of(resized(image, (height * rows, width * columns), self._resample))
        tiles = pixels.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
        return list(tiles.reshape(rows * columns, height, width, 3))


def _tile_limits(image: JsonObject) -> tuple[int, int]:
    """Return the least and most tiles, the thumbnail not counted."""
    least = image.integer("min_patches", 1, high=MAX_TILES)
    most = image.integer("max_patches", 12, high=MAX_TILES)
    if not image.flag(CUTTING, True):
        return 1, 1
    if least > most:
        raise ValidationError(f"min_patches is {least}, more than max_patches, {most}", param=OPTIONS_FIELD)
    return least, most


def best_grid(size: Size, tile: Size, least: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) closest to the image's proportions.

    Among equally close ones a larger grid is chosen if the image has more than half its pixels.
    """
    proportion, area = size[1] / size[0], size[0] * size[1]
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= rows * columns <= most
    ]
    best, distance = (1, 1), float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        other = abs(proportion - columns / rows)
        is_filled = area > 0.5 * tile[0] * tile[1] * rows * columns
        if other < distance or (other == distance and is_filled):
            best, distance = (rows, columns), other
    return best
