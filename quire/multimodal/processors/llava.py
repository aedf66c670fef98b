# SPDX-License-Identifier: Apache-2.0
"""LLaVA 1.5, PaliGemma and relatives: one square image, one run of fixed length.

Paper: Improved Baselines with Visual Instruction Tuning (2310.03744). The encoder is CLIP or SigLIP; CLIP's class
token is dropped unless the checkpoint selects full features. Checkpoints of this architecture with Pixtral's processor
are Pixtral's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import (
    Arrays,
    Placeholders,
    Prepared,
    Processor,
    Size,
    check_prepared_pixels,
    fixed_embeds,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import ProcessorFiles
from quire.multimodal.processors.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
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
from quire.multimodal.processors.pixtral import PixtralProcessor

CLIP_ENCODERS = ("clip_vision_model",)
PADDING = "do_pad"
NEWLINE = "\n"


class LlavaProcessor(Processor):
    """Processor that resizes the shorter side, or both, and crops the center.

    Args:
        num_embeddings: per image.
    """

    OPTIONS = frozenset({PADDING})
    usual_kind = "CLIPImageProcessor"

    def __init__(self, files: ProcessorFiles, num_embeddings: int) -> None:
        image = files.image
        self._image = image
        is_clip = "siglip" not in image.text("image_processor_type", self.usual_kind).lower()
        mean, std = (CLIP_MEAN, CLIP_STD) if is_clip else (HALVES, HALVES)
        self._table = table_of(image, mean, std)
        self._background = _background(image.numbers("image_mean") if "image_mean" in image else mean)
        self._resample = resample_of(image, BICUBIC)
        image.only("do_resize", True)
        self._crop = square_of(image, "crop_size", 224) if image.flag("do_center_crop", is_clip) else None
        self._size: Size | int = _target(image)
        self._pads(image)
        self.placeholder = self.marker = files.token("image_token", "<image>")
        self.literals = (self.placeholder,)
        self._runs = (Placeholders(((self.placeholder, num_embeddings),)),)

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        files = ProcessorFiles(model_dir, options)
        if files.image.text("image_processor_type", "").startswith("Pixtral"):
            return PixtralProcessor(files)
        return cls(files, num_embeddings(files))

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            pads = self._pads(request_options(self._image, options))
        image = as_rgb(image)
        if pads:
            image = _padded(image, self._background)
        size = with_short_side(size_of(image), self._size) if isinstance(self._size, int) else self._size
        check_prepared_pixels(size[0] * size[1])
        pixels = pixels_of(resized(image, size, self._resample))
        if self._crop is not None:
            pixels = cropped(pixels, self._crop)
        return Prepared(
            {PIXELS: np.ascontiguousarray(pixels), TABLE: self._table}, self.placeholder, self._runs
        )

    def prepare_embeds(self, values: NDArray[np.float32]) -> Prepared:
        return fixed_embeds(self.placeholder, self._runs, values, both_ways=False)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return one_image(arrays)

    @staticmethod
    def _pads(image: JsonObject) -> bool:
        """Return whether images are padded to squares, which only LLaVA's own image processor does."""
        is_own = image.text("image_processor_type", "").startswith("LlavaImage")
        if not is_own:
            image.only(PADDING, False)
        return is_own and image.flag(PADDING, False)


class PaliGemmaProcessor(LlavaProcessor):
    """SigLIP's processor; the prompt around its images is a prefix that begins behind them.

    Papers: PaliGemma (2407.07726), PaliGemma 2 (2412.03555).
    """

    OPTIONS = frozenset[str]()
    usual_kind = "SiglipImageProcessor"

    def __init__(self, files: ProcessorFiles, num_embeddings: int) -> None:
        super().__init__(files, num_embeddings)
        self.prefix_form = (files.token("bos_token", "<bos>"), NEWLINE)

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        files = ProcessorFiles(model_dir, options)
        side = files.vision.integer("image_size", 224) // files.vision.integer("patch_size", 14)
        return cls(files, files.image.integer("image_seq_length", side * side))


def num_embeddings(files: ProcessorFiles) -> int:
    """Return the number of features that the encoder gives and the checkpoint selects."""
    vision = files.vision
    side = vision.integer("image_size", 336) // vision.integer("patch_size", 14)
    has_class = vision.text("model_type", CLIP_ENCODERS[0]) in CLIP_ENCODERS
    drops_first = (
        files.config.choice("vision_feature_select_strategy", ("default", "full"), "default") == "default"
    )
    return side * side + has_class - drops_first


def _target(image: JsonObject) -> Size | int:
    """Return the size to resize to: (height, width), or the shorter side."""
    if isinstance(image.get("size"), int):
        return image.integer("size")
    sides = image.child("size")
    if "height" in sides:
        return sides.integer("height"), sides.integer("width")
    return sides.integer("shortest_edge", 224)


def _background(mean: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(int(value * 255) for value in mean)


def _padded(image: Image.Image, color: tuple[int, ...]) -> Image.Image:
    """Return the image in the middle of a square."""
    side = max(image.size)
    check_prepared_pixels(side * side)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
