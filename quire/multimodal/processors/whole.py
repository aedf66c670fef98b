# SPDX-License-Identifier: Apache-2.0
"""Images that an encoder reads for cross-attention: TrOCR's (ViT or DeiT) and Donut's, each of one size.

An image has no placeholders: it fills the first positions of a sequence, before the decoder's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ModelLoadError
from quire.models.json_object import JsonObject
from quire.models.vision_rows import SWIN, image_size, num_rows
from quire.multimodal.processors.base import Arrays, Prepared, Processor, Size, check_prepared_pixels
from quire.multimodal.processors.files import ProcessorFiles
from quire.multimodal.processors.pixels import (
    BICUBIC,
    BILINEAR,
    HALVES,
    PIXELS,
    TABLE,
    as_rgb,
    cropped,
    one_image,
    pixels_of,
    resample_of,
    resized,
    size_of,
    square_of,
    table_of,
    with_short_side,
)

MARKER = "<image>"
"""Marks an image in a rendered chat; it is no token."""


class WholeImageProcessor(Processor):
    """Processor that resizes to one size: DeiT's crops the center."""

    OPTIONS = frozenset[str]()
    marker = placeholder = MARKER
    literals = ()

    def __init__(self, files: ProcessorFiles) -> None:
        image, encoder = files.image, files.config.child("encoder")
        self._image = image
        self._table = table_of(image, HALVES, HALVES)
        self.num_encoded = num_rows(encoder)
        self._read(image)
        if self.output_size != image_size(encoder):
            raise ModelLoadError(
                f"{image.where}: images would have {self.output_size[0]} x {self.output_size[1]} pixels, but the "
                f"encoder of config.json reads {image_size(encoder)[0]} x {image_size(encoder)[1]}; make them equal"
            )

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        files = ProcessorFiles(model_dir, options)
        is_donut = files.config.child("encoder").get("model_type") == SWIN
        return (DonutProcessor if is_donut else WholeImageProcessor)(files)

    def _read(self, image: JsonObject) -> None:
        """Read the steps, and set `output_size` to (height, width)."""
        is_deit = image.text("image_processor_type", "ViT").startswith("DeiT")
        image.only("do_resize", True)
        self._resample = resample_of(image, BICUBIC if is_deit else BILINEAR)
        self._size: Size = square_of(image, "size", 256 if is_deit else 224)
        crops = image.flag("do_center_crop", is_deit)
        self._crop = square_of(image, "crop_size", 224) if crops else None
        self.output_size: Size = self._crop or self._size

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        pixels = self._pixels(as_rgb(image))
        return Prepared({PIXELS: np.ascontiguousarray(pixels), TABLE: self._table}, "", ())

    def _pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        check_prepared_pixels(self._size[0] * self._size[1])
        pixels = pixels_of(resized(image, self._size, self._resample))
        return pixels if self._crop is None else cropped(pixels, self._crop)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)


class DonutProcessor(WholeImageProcessor):
    """Processor that fits an image into a page, in the middle of black, perhaps turned as the page is."""

    def _read(self, image: JsonObject) -> None:
        for step in ("do_resize", "do_thumbnail", "do_pad"):
            image.only(step, True)
        image.only("do_center_crop", False)
        self._resample = resample_of(image, BILINEAR)
        self._turns = image.flag("do_align_long_axis", False)
        self.output_size = self._page(image)

    @staticmethod
    def _page(image: JsonObject) -> Size:
        """Return the page's (height, width); a list in the file has the width first."""
        if isinstance(image.get("size"), list):
            width, height = (int(side) for side in (*image.numbers("size"), 0, 0)[:2])
            return height, width
        height, width = square_of(image, "size", 0)
        return height or 2560, width or 1920

    def _pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        height, width = self.output_size
        if self._turns and (
            (width < height and image.width > image.height) or (width > height and image.width < image.height)
        ):
            image = image.transpose(Image.Transpose.ROTATE_270)
        short = with_short_side(size_of(image), min(height, width))
        check_prepared_pixels(short[0] * short[1])
        image = self._fitted(resized(image, short, self._resample))
        page = np.zeros((height, width, 3), np.uint8)
        top, left = (height - image.height) // 2, (width - image.width) // 2
        page[top : top + image.height, left : left + image.width] = pixels_of(image)
        return page

    def _fitted(self, image: Image.Image) -> Image.Image:
        """Return the image no larger than the page."""
        size = size_of(image)
        height, width = (min(side, most) for side, most in zip(size, self.output_size, strict=True))
        if (height, width) == size:
            return image
        if size[0] > size[1]:
            width = int(size[1] * height / size[0])
        elif size[1] > size[0]:
            height = int(size[0] * width / size[1])
        # transformers takes the filter 0, which is nearest, for none.
        return resized(image, (max(height, 1), max(width, 1)), self._resample or BICUBIC)
