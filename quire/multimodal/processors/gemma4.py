# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: images of any proportions, as large as a number of embeddings allows, and sounds.

Sides are rounded down to multiples of a square of patches, whose average is an embedding. Sounds are in `usm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
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
    Processor,
    Size,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
from quire.multimodal.processors.pixels import (
    BICUBIC,
    PIXELS,
    TABLE,
    as_rgb,
    pixels_of,
    resample_of,
    resized,
    size_of,
    table_of,
)
from quire.multimodal.processors.usm import Gemma4Sounds

VALUES, PLACES = "pixel_values", "image_position_ids"
SHAPE = "shape"  # Name of an array: int64 [2], side of a patch, and most patches.
BUDGET = "max_soft_tokens"
BUDGETS = (70, 140, 280, 560, 1120)
"""Most embeddings of an image that a request may choose."""
_ZEROS, _ONES = (0.0,) * 3, (1.0,) * 3


class Gemma4Processor(FilesProcessor):
    """Processor that keeps the proportions of an image."""

    OPTIONS = frozenset({BUDGET})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        self._image = image
        image.only("do_resize", True)
        self._table = table_of(
            image if image.flag("do_normalize", False) else _unnormalized(image), _ZEROS, _ONES
        )
        self._resample = resample_of(image, BICUBIC)
        self._patch = image.integer("patch_size", 16, high=1024)
        self._square = image.integer("pooling_kernel_size", 3, high=64)
        _budget(image)
        ahead = files.config.child("text_config").get("use_bidirectional_attention")
        self._both_ways = ahead == "vision"
        self.placeholder = self.marker = files.token("image_token", "<|image|>")
        first, last = files.token("boi_token", "<|image>"), files.token("eoi_token", "<image|>")
        self.literals = (first, self.placeholder, last)
        self._text = f"{first}{self.placeholder}{last}"

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        files = ProcessorFiles(model_dir, options)
        processor = cls(files)
        if "audio_config" in files.config:
            processor.sounds = Gemma4Sounds(model_dir)
        return processor

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            budget = _budget(request_options(self._image, options))
        side = self._patch * self._square
        size = fitted_size(size_of(image), side, budget)
        image = as_rgb(image)
        pixels = pixels_of(image if size == size_of(image) else resized(image, size, self._resample))
        shape = np.array([self._patch, budget * self._square**2], np.int64)
        run = Placeholders(((self.placeholder, size[0] * size[1] // side**2),))
        arrays: Arrays = {PIXELS: pixels, TABLE: self._table, SHAPE: shape}
        return Prepared(arrays, self._text, (run,), both_ways=self._both_ways)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return patches [1, n', p * p * 3] and their columns and rows [1, n', 2], filled up with 0 and -1.

        A sound's spectrogram is returned as it is.
        """
        if PIXELS not in arrays:
            return dict(arrays)
        pixels, table, (side, most) = arrays[PIXELS], arrays[TABLE], arrays[SHAPE]
        floats = np.empty(pixels.shape, np.float32)
        for channel in range(3):
            floats[..., channel] = table[channel][pixels[..., channel]]
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        blocks = floats.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        values = np.zeros((1, most, side * side * 3), np.float32)
        values[0, : rows * columns] = blocks.reshape(rows * columns, -1)
        places = np.full((1, most, 2), -1, np.int64)
        down, across = np.divmod(np.arange(rows * columns), columns)
        places[0, : rows * columns] = np.stack((across, down), 1)
        return {VALUES: values, PLACES: places}


def _unnormalized(image: JsonObject) -> JsonObject:
    return image.with_values(do_normalize=True, image_mean=list(_ZEROS), image_std=list(_ONES))


def _budget(image: JsonObject) -> int:
    budget = image.integer(BUDGET, 280)
    if budget not in BUDGETS:
        raise image.wrong(BUDGET, f"one of {', '.join(map(str, BUDGETS))}")
    return budget


def fitted_size(size: Size, side: int, budget: int) -> Size:
    """Return (height, width) in multiples of `side`, in about the same proportion, as large as `budget` squares of that
    side allow.
    """
    factor = math.sqrt(budget * side * side / (size[0] * size[1]))
    height, width = (math.floor(factor * each / side) for each in size)
    if not height and not width:
        raise ValidationError(f"an image of {size[1]} x {size[0]} pixels is too small", param="messages")
    if not height:
        height, width = 1, min(size[1] // size[0], budget)
    elif not width:
        height, width = min(size[0] // size[1], budget), 1
    return height * side, width * side
