# SPDX-License-Identifier: Apache-2.0
"""Phi-4-multimodal (2025, arXiv:2503.01743): an image in crops of the encoder's size, and as a whole.

transformers has this processor on torchvision alone; crops are those bits, and the whole is its within rounding.
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
from quire.multimodal.processors.internvl import best_grid
from quire.multimodal.processors.phi4_sound import Phi4Sounds
from quire.multimodal.processors.pixels import (
    BILINEAR,
    HALVES,
    PIXELS,
    TABLE,
    as_rgb,
    channels_first,
    pixels_of,
    size_of,
    square_of,
)
from quire.multimodal.processors.resampling import fused_table, resampled
from quire.multimodal.processors.sound import FEATURES

Floats = NDArray[np.float32]
MOST_CROPS = "dynamic_hd"
IMAGE_TOKEN = "<|endoftext10|>"  # In files that name none.
_MAX_CROPS = 64
_LEAST_SIDE = 10
_SQUARE = 2  # Side in patches of what becomes one embedding.
_CUBIC = -0.75
_WHOLE, _SHOWN, _PATCH = "whole", "shown", "patch"  # Names of arrays, beside `PIXELS`, which are the crops.


class Phi4Processor(FilesProcessor):
    """Processor that enlarges an image until it fills crops in one direction; the rest of them is white."""

    OPTIONS = frozenset({MOST_CROPS})

    def __init__(self, files: ProcessorFiles) -> None:
        image = self._image = files.image
        image.only("do_resize", True)
        self._table = fused_table(image, HALVES, HALVES)
        height, width = square_of(image, "size", 448)
        self._patch = image.integer("patch_size", 14)
        if height != width or height % (_SQUARE * self._patch):
            raise image.unsupported("size", f"a square of a multiple of {_SQUARE * self._patch} pixels")
        self._side = height
        self._most(image)
        self.placeholder = self.marker = files.token("image_token", IMAGE_TOKEN)
        self.literals = (self.placeholder,)
        self.sounds = Phi4Sounds(files.model_dir)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            most = self._most(request_options(self._image, options))
        size, side = size_of(image), self._side
        grid = crops_of(size, side, most)
        canvas = grid[0] * side, grid[1] * side
        check_prepared_pixels(canvas[0] * canvas[1])
        shown = fitted(size, canvas)
        if min(shown) < _LEAST_SIDE:
            raise ValidationError(
                f"an image of {size[1]} x {size[0]} pixels would be shown as {shown[1]} x {shown[0]}, and this model "
                f"takes {_LEAST_SIDE} pixels at least; crop it"
            )
        whole = np.full((*canvas, 3), 255, np.uint8)
        whole[: shown[0], : shown[1]] = resampled(pixels_of(as_rgb(image)), shown, BILINEAR)
        crops = whole.reshape(grid[0], side, grid[1], side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        patches = [
            length // self._patch - (length - own) // self._patch
            for length, own in zip(canvas, shown, strict=True)
        ]
        arrays: Arrays = {
            PIXELS: crops,
            TABLE: self._table,
            _WHOLE: _shrunk(whole, side, self._table),
            _SHOWN: np.array([canvas, patches], np.int64),
            _PATCH: np.array([self._patch], np.int64),
        }
        rows, columns = (-(-count // _SQUARE) for count in patches)
        own = side // (self._patch * _SQUARE)
        count = rows * (columns + 1) + 1 + own * (own + 1)
        return Prepared(arrays, self.placeholder, (Placeholders(((self.placeholder, count),)),))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        if FEATURES in arrays:
            return dict(arrays)
        crops = channels_first(arrays)
        canvas, shown = arrays[_SHOWN]
        per_side = crops.shape[-1] // int(arrays[_PATCH][0])
        rows, columns = (length // crops.shape[-1] for length in canvas)
        mask = np.zeros((rows * per_side, columns * per_side), np.float32)
        mask[: shown[0], : shown[1]] = 1.0
        of_crops = mask.reshape(rows, per_side, columns, per_side).swapaxes(1, 2)
        masks = np.ones((1 + len(crops), per_side, per_side), np.float32)
        masks[1:] = of_crops.reshape(masks[1:].shape)
        return {
            "image_pixel_values": np.concatenate((arrays[_WHOLE][None], crops))[None],
            "image_sizes": canvas[None].astype(np.int64),
            "image_attention_mask": masks[None],
        }

    @staticmethod
    def _most(image: JsonObject) -> int:
        return image.integer(MOST_CROPS, 36, high=_MAX_CROPS)


def crops_of(size: Size, side: int, most: int) -> Size:
    """Return the rows and columns of crops: those that hold the image, or the closest proportions of so many."""
    rows, columns = (math.ceil(length / side) for length in size)
    return (rows, columns) if rows * columns <= most else best_grid(size, (side, side), 1, most)


def fitted(size: Size, canvas: Size) -> Size:
    """Return the (height, width) of an image that fills a canvas in one direction."""
    down, across = (target / own for target, own in zip(canvas, size, strict=True))
    return (int(size[0] * across), canvas[1]) if across < down else (canvas[0], int(size[1] * down))


def _shrunk(whole: NDArray[np.uint8], side: int, table: Floats) -> Floats:
    """Return the normalized pixels [3, side, side] of an image by cubic interpolation of the four nearest ones."""
    (rows, down), (columns, across) = (_taps(length, side) for length in whole.shape[:2])
    picked = channels_first({PIXELS: whole[rows.ravel()], TABLE: table})
    wide = picked[:, :, columns.ravel()].reshape(3, side, 4, side, 4)
    found: Floats = np.einsum("crvkw,rv,kw->crk", wide, down, across, optimize=True).astype(np.float32)
    return found


def _taps(inputs: int, outputs: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the inputs [outputs, 4] of each output, the edge repeated, and their weights."""
    places = (np.arange(outputs) + 0.5) * (inputs / outputs) - 0.5
    first = np.floor(places)
    beyond = places - first
    distances = np.stack((beyond + 1, beyond, 1 - beyond, 2 - beyond), 1)
    near = ((_CUBIC + 2) * distances - (_CUBIC + 3)) * distances**2 + 1
    far = ((_CUBIC * distances - 5 * _CUBIC) * distances + 8 * _CUBIC) * distances - 4 * _CUBIC
    weights = np.where(distances <= 1, near, far).astype(np.float32)
    taps = first[:, None].astype(np.int64) + np.arange(-1, 3)
    return np.clip(taps, 0, inputs - 1), weights
