# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.6: the whole image, and slices of a large one, each in its own proportions.

Papers: LLaVA-UHD (2403.11703), MiniCPM-V (2408.01800).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.models.json_object import JsonObject
from quire.multimodal.door.layout import NUMBER
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
    HALVES,
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

MERGES = {"16x": 4, "4x": 2}
"""Value of `downsample_mode` -> side, in patches, of what becomes one embedding."""
MAX_SLICES, SLICING = "max_slice_nums", "slice_mode"
_MOST_SLICES = 64
_SLICES, _PATCH = "slices", "patch_size"  # Names of arrays: uint8 [k, h, w, 3] and int64 [1].


class MiniCPMVProcessor(FilesProcessor):
    """Processor that gives an image as many pixels as the encoder was trained for, and so each slice."""

    OPTIONS = frozenset({MAX_SLICES, SLICING})

    def __init__(self, files: ProcessorFiles) -> None:
        image = self._image = files.image
        self._table = table_of(image, HALVES, HALVES)
        self._resample = resample_of(image, BICUBIC)
        image.only("do_resize", True)
        self._patch = image.integer("patch_size", 14)
        self._side = image.integer("scale_resolution", 448)
        mode = files.config.choice("downsample_mode", tuple(MERGES), "16x")
        image.only("downsample_mode", mode)
        self._merge = MERGES[mode]
        self._limits(image)
        self.placeholder = self.marker = files.token("image_token", "<|image_pad|>")
        names = ("image", "slice")
        ends = {
            name: (
                files.token(f"{name}_start_token", f"<{name}>"),
                files.token(f"{name}_end_token", f"</{name}>"),
            )
            for name in (*names, "image_id")
        }
        self._whole, self._slice = (self.placeholder.join(ends[name]) for name in names)
        is_numbered = files.processor.flag("use_image_id", image.flag("use_image_id", True))
        self._number = NUMBER.join(ends["image_id"]) if is_numbered else ""
        self.literals = (self.placeholder, *(token for pair in ends.values() for token in pair))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            most, slices = self._limits(request_options(self._image, options))
        image = as_rgb(image)
        grid = best_grid(size_of(image), most, self._side) if slices else None
        whole = self._resized(image, self._best_size(size_of(image), grow=grid is None))
        arrays: Arrays = {PIXELS: whole, TABLE: self._table, _PATCH: np.array([self._patch], np.int64)}
        runs, text = [self._run(whole.shape[:2])], self._number + self._whole
        if grid is not None:
            tiles = arrays[_SLICES] = self._tiles(image, grid)
            runs += [self._run(tiles.shape[1:3])] * len(tiles)
            text += "\n".join([self._slice * grid[1]] * grid[0])
        return Prepared(arrays, text, tuple(runs))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        patch = int(arrays[_PATCH][0])
        tiles = [arrays[PIXELS], *arrays.get(_SLICES, ())]
        rows = [_in_rows(channels_first({PIXELS: tile, TABLE: arrays[TABLE]}), patch) for tile in tiles]
        sizes = [[side // patch for side in tile.shape[:2]] for tile in tiles]
        return {
            "pixel_values": np.concatenate(rows, axis=-1)[None],
            "target_sizes": np.array(sizes, dtype=np.int32),
        }

    @staticmethod
    def _limits(image: JsonObject) -> tuple[int, bool]:
        """Return the most slices, and whether there are any."""
        return image.integer(MAX_SLICES, 9, high=_MOST_SLICES), image.flag(SLICING, True)

    def _run(self, size: tuple[int, ...]) -> Placeholders:
        unit = self._patch * self._merge
        return Placeholders(((self.placeholder, (size[0] // unit) * (size[1] // unit)),))

    def _resized(self, image: Image.Image, size: Size) -> NDArray[np.uint8]:
        check_prepared_pixels(size[0] * size[1])
        return pixels_of(resized(image, size, self._resample))

    def _best_size(self, size: tuple[float, float], *, grow: bool) -> Size:
        """Return a size of whole embeddings in proportion, of `scale_resolution` squared pixels or of fewer."""
        height, width = size
        if grow or height * width > self._side**2:
            ratio = width / height
            height = int(self._side / math.sqrt(ratio))
            width = int(height * ratio)
        unit = self._patch * self._merge
        return rounded(height, unit), rounded(width, unit)

    def _tiles(self, image: Image.Image, grid: Size) -> NDArray[np.uint8]:
        """Return the slices [k, h, w, 3] of an image, row by row."""
        rows, columns = grid
        height, width = (rounded(side, count) for side, count in zip(size_of(image), grid, strict=True))
        down, across = self._best_size((height / rows, width / columns), grow=True)
        whole = self._resized(image, (down * rows, across * columns))
        tiles = whole.reshape(rows, down, columns, across, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(tiles.reshape(rows * columns, down, across, 3))


def rounded(length: float, unit: int) -> int:
    """Return the multiple of a unit that is nearest to a length, at least one unit."""
    return max(round(length / unit) * unit, unit)


def best_grid(size: Size, most: int, side: int) -> Size | None:
    """Return the rows and columns of an image's slices, nearest to its proportions; None: it is small enough."""
    height, width = size
    ratio = math.log(width / height)
    wanted = min(math.ceil(width * height / (side * side)), most)
    if wanted <= 1:
        return None
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    best, least = (1, 1), math.inf
    for rows, columns in grids:
        error = abs(ratio - math.log(columns / rows))
        if error < least or (error == least and rows > best[0]):
            best, least = (rows, columns), error
    return best


def _in_rows(values: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
    """Return the patches of an image [3, H, W] side by side: [3, patch, n * patch]."""
    rows, columns = (side // patch for side in values.shape[1:])
    split = values.reshape(3, rows, patch, columns, patch).transpose(0, 2, 1, 3, 4)
    return split.reshape(3, patch, -1)
