# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: one square image, one run of fixed length whose positions attend both ways.

Report: Gemma 3 (2503.19786). Pan and scan, off by default, adds crops of a long image, each with a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    check_prepared_pixels,
    fixed_embeds,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import FilesProcessor, ProcessorFiles
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
MIN_SIZE, MAX_CROPS, MIN_RATIO = (
    f"pan_and_scan_{name}" for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
)
MOST_CROPS = 64


@dataclass(frozen=True)
class PanAndScan:
    """Rule by which an image gets crops.

    Args:
        min_size: shortest side of a crop.
        max_crops: per image.
        min_ratio: of the longer side over the shorter one; shorter images get no crops.
    """

    min_size: int
    max_crops: int
    min_ratio: float

    def crops(self, image: Image.Image) -> list[Image.Image]:
        """Return parts of an image that divide its longer side.

        Raises:
            ValidationError: a crop would be empty.
        """
        short, long = sorted(image.size)
        if long / short < self.min_ratio:
            return []
        count = min(max(min(int(long / short + 0.5), long // self.min_size), 2), self.max_crops)
        step = -(-long // count)
        if min(step, short) < self.min_size:
            return []
        if step * (count - 1) >= long:
            raise ValidationError(
                f"a side of {long} pixels has no {count} crops; use a larger {MIN_SIZE}", param=OPTIONS_FIELD
            )
        starts = range(0, long, step)
        if image.width >= image.height:
            return [image.crop((at, 0, min(at + step, long), short)) for at in starts]
        return [image.crop((0, at, short, min(at + step, long))) for at in starts]


class Gemma3Processor(FilesProcessor):
    """Processor that resizes to a square, whatever the proportions."""

    OPTIONS = frozenset({PAN_AND_SCAN, MIN_SIZE, MAX_CROPS, MIN_RATIO})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        image.only("do_resize", True)
        self._image = image
        _rule(image)
        self._table = table_of(image, HALVES, HALVES)
        self._size = square_of(image, "size", 224)
        self._resample = resample_of(image, BILINEAR)
        count = files.processor.integer("image_seq_length", files.config.integer("mm_tokens_per_image", 256))
        self.placeholder = files.token("image_token", "<image_soft_token>")
        self.marker = files.token("boi_token", "<start_of_image>")
        last = files.token("eoi_token", "<end_of_image>")
        self.literals = (self.marker, self.placeholder, last)
        self._text = f"\n\n{self.marker}{self.placeholder}{last}\n\n"
        self._run = Placeholders(((self.placeholder, count),))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            rule = _rule(request_options(self._image, options))
        image = as_rgb(image)
        crops = [] if rule is None else rule.crops(image)
        check_prepared_pixels((1 + len(crops)) * self._size[0] * self._size[1])
        pixels = np.stack([pixels_of(resized(each, self._size, self._resample)) for each in (image, *crops)])
        arrays: Arrays = {PIXELS: pixels, TABLE: self._table}
        return Prepared(arrays, self._shown(len(crops)), (self._run,) * len(pixels), both_ways=True)

    def _shown(self, num_crops: int) -> str:
        """Return the text of an image, with the words that the model was trained to see around crops."""
        if not num_crops:
            return self._text
        crops = " ".join([self._text] * num_crops)
        return (
            f"Here is the original image {self._text} and here are some crops to help you see better {crops}"
        )

    def prepare_embeds(self, values: NDArray[np.float32]) -> Prepared:
        return fixed_embeds(self._text, (self._run,), values, both_ways=True)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)


def _rule(image: JsonObject) -> PanAndScan | None:
    """Return the rule of a checkpoint's or a request's options; None: no crops."""
    rule = PanAndScan(
        image.integer(MIN_SIZE, 256),
        image.integer(MAX_CROPS, 4, high=MOST_CROPS),
        image.number(MIN_RATIO, 1.2, low=1.0),
    )
    return rule if image.flag(PAN_AND_SCAN, False) else None
