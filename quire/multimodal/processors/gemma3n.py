# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n: an image is resized to a square, and is one run of tokens between markers; sounds as in `usm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import OPTIONS_FIELD, Arrays, Placeholders, Prepared
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
from quire.multimodal.processors.gemma4 import unnormalized
from quire.multimodal.processors.pixels import (
    BICUBIC,
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
from quire.multimodal.processors.usm import Gemma3nSounds

PIXEL_VALUES = "pixel_values"
_ENCODER = "mobilenetv5_300m_enc"


def sees(config: JsonObject) -> bool:
    """Return whether a model's encoder of images is one that is computed."""
    return config.child("vision_config").text("architecture", _ENCODER) == _ENCODER


class Gemma3nProcessor(FilesProcessor):
    """Processor of images and sounds; of sounds alone if the encoder of images is an unknown one."""

    OPTIONS = frozenset[str]()

    def __init__(self, files: ProcessorFiles) -> None:
        self.sounds = Gemma3nSounds(files.model_dir)
        self.marker = self.placeholder = ""
        self.literals = ()
        self.takes_images = sees(files.config)
        if self.takes_images:
            self._read_image(files)

    def _read_image(self, files: ProcessorFiles) -> None:
        image = files.image
        image.only("do_resize", True)
        self._table = table_of(
            image if image.flag("do_normalize", True) else unnormalized(image), HALVES, HALVES
        )
        self._size = square_of(image, "size", 224)
        self._resample = resample_of(image, BICUBIC)
        count = files.config.integer("vision_soft_tokens_per_image", 256)
        if math.isqrt(count) ** 2 != count:
            raise files.config.unsupported("vision_soft_tokens_per_image", "a square")
        if files.processor.integer("image_seq_length", count) != count:
            raise files.processor.unsupported(
                "image_seq_length", f"{count}, config.json's vision_soft_tokens_per_image"
            )
        self.marker = self.placeholder = files.token("image_token", "<image_soft_token>")
        first, last = files.token("boi_token", "<start_of_image>"), files.token("eoi_token", "<end_of_image>")
        self.literals = (first, self.placeholder, last)
        self._text = f"\n\n{first}{self.placeholder}{last}\n\n"
        self._run = Placeholders(((self.placeholder, count),))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        if not self.takes_images:
            raise ValidationError("this model takes no images", param=OPTIONS_FIELD)
        pixels = pixels_of(resized(as_rgb(image), self._size, self._resample))
        return Prepared({PIXELS: pixels, TABLE: self._table}, self._text, (self._run,))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[np.generic]]) -> Arrays:
        return one_image(arrays) if PIXELS in arrays else dict(arrays)
