# SPDX-License-Identifier: Apache-2.0
"""Idefics 3 and SmolVLM: tiles of a large image, each with a marker of its row and column, and the whole image last.

Papers: Building and better understanding vision-language models (2408.12637), SmolVLM (2504.05299).
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
    HALVES,
    LANCZOS,
    PIXELS,
    TABLE,
    as_rgb,
    channels_first,
    pixels_of,
    resample_of,
    resized,
    side_of,
    size_of,
    table_of,
)

MAX_SIDE = 4096
MASKED = "masked"  # Name of an array: int64 [1], whether the encoder takes a mask of padding.
SPLITTING = "do_image_splitting"


class Idefics3Processor(FilesProcessor):
    """Processor that resizes to whole tiles, cuts them, and adds the whole image as a last tile."""

    OPTIONS = frozenset({SPLITTING, "size"})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        self._image = image
        image.only("do_resize", True)
        self._table = table_of(image, HALVES, HALVES)
        self._resample = resample_of(image, LANCZOS)
        self._tile = side_of(image, "max_image_size", "longest_edge", 364)
        self._masked = image.flag("do_pad", True)
        self._plan(image)
        count = files.processor.integer("image_seq_len", _tile_embeddings(files))
        self.placeholder = self.marker = files.token("image_token", "<image>")
        self._around = files.token("fake_image_token", "<fake_token_around_image>")
        self._whole = files.token("global_image_token", "<global-img>")
        self.literals = (self.placeholder, self._around, self._whole)
        self._run = Placeholders(((self.placeholder, count),))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            longest, splits = self._plan(request_options(self._image, options))
        image = self._resized(as_rgb(image), scaled_size(size_of(image), longest))
        rows = columns = 0
        if splits:
            image = self._resized(image, self._whole_tiles(size_of(image)))
            rows, columns = (side // self._tile for side in size_of(image))
        tiles = [] if rows * columns <= 1 else self._cut(image, rows, columns)
        if not splits or tiles:
            image = self._resized(image, (self._tile, self._tile))
        pixels = np.stack([*tiles, pixels_of(image)])
        arrays: Arrays = {PIXELS: pixels, TABLE: self._table, MASKED: np.array([self._masked], np.int64)}
        text = self._text(rows, columns) if tiles else self._last
        return Prepared(arrays, text, (self._run,) * len(pixels))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        values = channels_first(arrays)[None]
        floats: Arrays = {"pixel_values": values}
        if arrays[MASKED][0]:
            floats["pixel_attention_mask"] = np.ones((*values.shape[:2], *values.shape[3:]), np.int64)
        return floats

    def _plan(self, image: JsonObject) -> tuple[int, bool]:
        """Return the longest side before tiles are cut, and whether they are."""
        return side_of(image, "size", "longest_edge", 4 * self._tile), image.flag(SPLITTING, True)

    def _resized(self, image: Image.Image, size: Size) -> Image.Image:
        check_prepared_pixels(size[0] * size[1])
        return resized(image, size, self._resample)

    def _whole_tiles(self, size: Size) -> Size:
        """Return the sides in whole tiles: the longer one rounded up first, the other by the old proportion."""
        height, width = size
        proportion = width / height
        if width >= height:
            width = self._rounded_up(width)
            return self._rounded_up(int(width / proportion)), width
        height = self._rounded_up(height)
        return height, self._rounded_up(int(height * proportion))

    def _rounded_up(self, side: int) -> int:
        return math.ceil(side / self._tile) * self._tile

    def _cut(self, image: Image.Image, rows: int, columns: int) -> list[NDArray[np.uint8]]:
        pixels, side = pixels_of(image), self._tile
        starts = [(row * side, column * side) for row in range(rows) for column in range(columns)]
        return [pixels[top : top + side, left : left + side] for top, left in starts]

    @property
    def _last(self) -> str:
        return f"{self._around}{self._whole}{self.placeholder}{self._around}"

    def _text(self, rows: int, columns: int) -> str:
        lines = [
            "".join(
                f"{self._around}<row_{row}_col_{column}>{self.placeholder}"
                for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        ]
        return "".join(f"{line}\n" for line in lines) + "\n" + self._last


def scaled_size(size: Size, longest: int) -> Size:
    """Return the sides with the longer one `longest`, the other in proportion and even; none above the limit."""
    height, width = size
    proportion = width / height
    if width >= height:
        width, height = longest, int(longest / proportion)
        height += height % 2
    else:
        height, width = longest, int(longest * proportion)
        width += width % 2
    return _below_limit(max(height, 1), max(width, 1))


def _below_limit(height: int, width: int) -> Size:
    proportion = width / height
    if width >= height and width > MAX_SIDE:
        return max(int(MAX_SIDE / proportion), 1), MAX_SIDE
    if height > width and height > MAX_SIDE:
        return MAX_SIDE, max(int(MAX_SIDE * proportion), 1)
    return height, width


def _tile_embeddings(files: ProcessorFiles) -> int:
    """Return the embeddings of a tile by the encoder's sizes, for checkpoints whose files do not say it."""
    patches = files.vision.integer("image_size", 364) // files.vision.integer("patch_size", 14)
    return max(patches * patches // files.config.integer("scale_factor", 2) ** 2, 1)
