# SPDX-License-Identifier: Apache-2.0
"""Llama 4 (2025): tiles on the canvas that fits best, and the whole image last, with separators between them.

transformers has this processor on torchvision alone, and normalizes in bfloat16; pixels are those bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
    BILINEAR,
    FACTOR,
    HALVES,
    PIXELS,
    TABLE,
    as_rgb,
    one_image,
    pixels_of,
    size_of,
    square_of,
    stats_of,
)
from quire.multimodal.processors.resampling import filter_of, resampled

MAX_TILES = 64
Floats = NDArray[np.float32]


class Llama4Processor(FilesProcessor):
    """Processor of images in tiles of one side."""

    OPTIONS = frozenset({"max_patches", "resize_to_max_canvas"})

    def __init__(self, files: ProcessorFiles) -> None:
        image = self._image = files.image
        image.only("do_resize", True)
        self._table = _table(*stats_of(image, HALVES, HALVES), image.number("rescale_factor", FACTOR))
        self._resample = filter_of(image, BILINEAR)
        height, width = square_of(image, "size", 336)
        if height != width:
            raise image.unsupported("size", "a square")
        self._side = height
        patch = files.processor.integer("patch_size", files.vision.integer("patch_size", 14))
        ratio = files.processor.number("pixel_shuffle_ratio", files.vision.number("pixel_shuffle_ratio", 0.5))
        self._count = (height // patch) ** 2 // round(1 / ratio**2)
        token = files.token
        self.marker = token("image_token", "<|image|>")
        self.placeholder = token("patch_token", "<|patch|>")
        self._start = token("start_of_image_token", "<|image_start|>")
        self._end = token("end_of_image_token", "<|image_end|>")
        self._across = token("tile_x_separator_token", "<|tile_x_separator|>")
        self._down = token("tile_y_separator_token", "<|tile_y_separator|>")
        marks = (self._start, self._end, self._across, self._down)
        self.literals = (self.marker, self.placeholder, *marks)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            values = request_options(self._image, options)
            most = values.integer("max_patches", 16, high=MAX_TILES)
            is_largest = values.flag("resize_to_max_canvas", False)
        size, side = size_of(image), self._side
        canvas = best_canvas(size, side, most, is_largest=is_largest)
        check_prepared_pixels(canvas[0] * canvas[1] + side * side)
        pixels = pixels_of(as_rgb(image))
        shown = resampled(pixels, fitted(size, canvas, None if is_largest else side), self._resample)
        tiles = _tiles(shown, canvas, side)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resampled(pixels, (side, side), self._resample)[None]))
        text = self._text(canvas[0] // side, canvas[1] // side)
        runs = (Placeholders(((self.placeholder, self._count),)),) * len(tiles)
        return Prepared({PIXELS: tiles, TABLE: self._table}, text, runs)

    def _text(self, rows: int, columns: int) -> str:
        row = self._across.join([self.placeholder] * columns) + self._down
        tiles = row * rows if rows * columns > 1 else ""
        return f"{self._start}{tiles}{self.marker}{self.placeholder}{self._end}"

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)


def _table(mean: tuple[float, ...], std: tuple[float, ...], factor: float) -> Floats:
    """Return the table [3, 256] of values that were scaled, shifted and divided in bfloat16."""
    means, stds = (_bfloat16(np.array(values, np.float32))[:, None] for values in (mean, std))
    scaled = _bfloat16(np.arange(256, dtype=np.float32) * np.float32(factor))
    return _bfloat16(_bfloat16(scaled - means) / stds)


def _bfloat16(values: Floats) -> Floats:
    """Return the values rounded to bfloat16, to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@lru_cache(maxsize=16)
def _canvases(side: int, most: int) -> NDArray[np.int64]:
    """Return the sizes [n, 2] of up to so many tiles, of one proportion after another."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            by_ratio.setdefault(rows / (count // rows), []).append((rows * side, count // rows * side))
    return np.array([size for sizes in by_ratio.values() for size in sizes], np.int64)


def best_canvas(size: Size, side: int, most: int, *, is_largest: bool) -> Size:
    """Return the (height, width) on which an image is enlarged least or, if none is large enough, shrunk least."""
    canvases = _canvases(side, most)
    scales = (canvases.astype(np.float32) / np.array(size, np.float32)).min(1)
    larger = scales[scales >= 1]
    chosen = scales.max() if not len(larger) else larger.max() if is_largest else larger.min()
    fitting = canvases[scales == chosen]
    height, width = fitting[fitting.prod(1).argmin()]
    return int(height), int(width)


def fitted(size: Size, canvas: Size, largest: int | None) -> Size:
    """Return the (height, width) of an image on a canvas; a side beyond `largest` is not enlarged.

    A side that the canvas bounds is divided in float32, as torch divides its integers.
    """
    target, is_float32 = list(canvas), [True, True]
    for axis in (0, 1) if largest is not None else ():
        own = max(size[axis], largest or 0)
        is_float32[axis] = canvas[axis] < own
        target[axis] = min(own, canvas[axis])
    down, across = (
        np.float32(goal) / np.float32(length) if is_short else goal / length
        for goal, length, is_short in zip(target, size, is_float32, strict=True)
    )
    if across < down:
        return max(min(math.floor(size[0] * across), target[0]), 1), max(target[1], 1)
    return max(target[0], 1), max(min(math.floor(size[1] * down), target[1]), 1)


def _tiles(shown: NDArray[np.uint8], canvas: Size, side: int) -> NDArray[np.uint8]:
    """Return the tiles [n, side, side, 3] of an image in the upper left of a canvas, row by row."""
    whole = np.zeros((*canvas, 3), np.uint8)
    whole[: shown.shape[0], : shown.shape[1]] = shown
    rows, columns = canvas[0] // side, canvas[1] // side
    return whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
