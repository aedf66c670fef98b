# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: one square image, one run of fixed length whose positions attend both ways.

Report: Gemma 3 (2503.19786). Pan and scan, which adds crops of an image, is not implemented; it is off by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.multimodal.processors.base import Arrays, Placeholders, Prepared, Processor, fixed_embeds
from quire.multimodal.processors.files import ProcessorFiles
from quire.multimodal.processors.pixels import (
    BILINEAR,
    HALVES,
    PIXELS,
    TABLE,
    as_rgb,
    one_image,
    pixels_of,
    resample_of,
    resized,
    square_of,
    table_of,
)

PAN_AND_SCAN = "do_pan_and_scan"


class Gemma3Processor(Processor):
    """Processor that resizes to a square, whatever the proportions."""

    OPTIONS = frozenset[str]()

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        image.only("do_resize", True)
        image.only(PAN_AND_SCAN, False)
        self._table = table_of(image, HALVES, HALVES)
        self._size = square_of(image, "size", 224)
        self._resample = resample_of(image, BILINEAR)
        count = files.processor.integer("image_seq_length", files.config.integer("mm_tokens_per_image", 256))
        self.placeholder = files.token("image_token", "<image_soft_token>")
        self.marker = files.token("boi_token", "<start_of_image>")
        last = files.token("eoi_token", "<end_of_image>")
        self.literals = (self.marker, self.placeholder, last)
        self._text = f"\n\n{self.marker}{self.placeholder}{last}\n\n"
        self._runs = (Placeholders(((self.placeholder, count),)),)

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        return cls(ProcessorFiles(model_dir, options))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        pixels = pixels_of(resized(as_rgb(image), self._size, self._resample))
        return Prepared({PIXELS: pixels, TABLE: self._table}, self._text, self._runs, both_ways=True)

    def prepare_embeds(self, values: NDArray[np.float32]) -> Prepared:
        return fixed_embeds(self._text, self._runs, values, both_ways=True)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)
