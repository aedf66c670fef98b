# SPDX-License-Identifier: Apache-2.0
"""Florence-2: an image of one size, whose rows an encoder reads before a text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ModelLoadError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import (
    Arrays,
    MediaTask,
    Placeholders,
    Prepared,
    check_prepared_pixels,
)
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
from quire.multimodal.processors.florence_tasks import AnswerRules, florence2_answer, read_question
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
    square_of,
    table_of,
)


class FlorenceProcessor(FilesProcessor):
    """Processor that resizes both sides."""

    OPTIONS = frozenset[str]()
    leads = True

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        image.only("do_resize", True)
        image.only("do_center_crop", False)
        self._table = table_of(image, CLIP_MEAN, CLIP_STD)
        self._resample = resample_of(image, BICUBIC)
        self._size = square_of(image, "size", 768)
        self.placeholder = self.marker = files.token("image_token", "<image>")
        self.literals = (self.placeholder,)
        count = _num_rows(files.vision, self._size)
        if image.integer("image_seq_length", count) != count:
            raise ModelLoadError(
                f"{image.where}: image_seq_length must be {count}, the rows of the encoder's image"
            )
        self._runs = (Placeholders(((self.placeholder, count),)),)
        self._rules = AnswerRules.of(files.processor)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        check_prepared_pixels(self._size[0] * self._size[1])
        pixels = pixels_of(resized(as_rgb(image), self._size, self._resample))
        arrays: Arrays = {PIXELS: np.ascontiguousarray(pixels), TABLE: self._table}
        return Prepared(arrays, self.placeholder, self._runs)

    def read_task(self, text: str) -> MediaTask | None:
        """See `Processor.read_task`."""
        question = read_question(text)
        if question is None:
            return None
        return MediaTask(question.text, partial(florence2_answer, question.task, rules=self._rules))

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)


def _num_rows(eyes: JsonObject, size: tuple[int, int]) -> int:
    """Return the rows of an image: its patches in the last stage, and their mean."""
    height, width = size
    shapes = (eyes.numbers(key) for key in ("patch_size", "patch_stride", "patch_padding"))
    for patch, stride, padding in zip(*shapes, strict=True):
        height, width = (int((side + 2 * padding - patch) // stride + 1) for side in (height, width))
    return height * width + 1
