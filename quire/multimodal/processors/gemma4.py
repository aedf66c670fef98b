# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: images and frames of any proportions, as large as a number of embeddings allows, and sounds.

Sides are rounded down to multiples of a square of patches, whose average is an embedding. A video is a run of
placeholders for each frame, behind its time as text. Sounds are in `usm.py`.
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
from quire.multimodal.processors.video import (
    USUAL_FPS,
    Clip,
    ResizedVideos,
    VideoFacts,
    counts_of,
    too_short,
)

VALUES, PLACES = "pixel_values", "image_position_ids"
VIDEO_VALUES, VIDEO_PLACES = "pixel_values_videos", "video_position_ids"
SHAPE = "shape"  # Name of an array: int64 [2], side of a patch, and most patches.
USUAL_FRAMES = 32
BUDGET = "max_soft_tokens"
BUDGETS = (70, 140, 280, 560, 1120)
"""Most embeddings of an image that a request may choose."""
_VIDEO_BUDGET = 70
_ZEROS, _ONES = (0.0,) * 3, (1.0,) * 3


class Gemma4Processor(FilesProcessor):
    """Processor that keeps the proportions of an image."""

    OPTIONS = frozenset({BUDGET})

    def __init__(self, files: ProcessorFiles) -> None:
        image = files.image
        self._image = image
        image.only("do_resize", True)
        self._table = table_of(
            image if image.flag("do_normalize", False) else unnormalized(image), _ZEROS, _ONES
        )
        self._resample = resample_of(image, BICUBIC)
        self._patch = image.integer("patch_size", 16, high=1024)
        self._square = image.integer("pooling_kernel_size", 3, high=64)
        budget_of(image)
        ahead = files.config.child("text_config").get("use_bidirectional_attention")
        self._both_ways = ahead == "vision"
        self.placeholder = self.marker = files.token("image_token", "<|image|>")
        first, last = files.token("boi_token", "<|image>"), files.token("eoi_token", "<image|>")
        self.literals = (first, self.placeholder, last)
        self._text = f"{first}{self.placeholder}{last}"
        self.videos = Gemma4Videos(files, (first, last), both_ways=self._both_ways)
        if "audio_config" in files.config:
            self.sounds = Gemma4Sounds(files.model_dir)

    def prepare(self, image: Image.Image, options: Mapping[str, Any]) -> Prepared:
        with request_errors():
            budget = budget_of(request_options(self._image, options))
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

        Those of a video are [T, n', p * p * 3] and [T, n', 2], by names of their own. A sound's spectrogram is returned
        as it is.
        """
        if PIXELS not in arrays:
            return dict(arrays)
        pixels = arrays[PIXELS]
        frames, names = (
            (pixels, (VIDEO_VALUES, VIDEO_PLACES)) if pixels.ndim == 4 else (pixels[None], (VALUES, PLACES))
        )
        found = (_in_patches(frame, arrays[TABLE], *map(int, arrays[SHAPE])) for frame in frames)
        return dict(zip(names, map(np.stack, zip(*found, strict=True)), strict=True))


class Gemma4Videos(ResizedVideos):
    """Processor of videos, each frame an image between markers.

    Args:
        ends: markers before and behind a frame.
        both_ways: the positions of a frame attend to one another.
    """

    OPTIONS = frozenset({"fps", "num_frames", "do_sample_frames", BUDGET})
    usual_token = "<|video|>"
    samples_arrays = True

    def __init__(self, files: ProcessorFiles, ends: tuple[str, str], *, both_ways: bool) -> None:
        super().__init__(files, _ZEROS, _ONES, BICUBIC)
        video = self._video
        self._patch = video.integer("patch_size", 16, high=1024)
        self._square = video.integer("pooling_kernel_size", 3, high=64)
        self._count = video.integer("num_frames", USUAL_FRAMES)
        budget_of(video, _VIDEO_BUDGET)
        self._frame, self._both_ways = self.placeholder.join(ends), both_ways

    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        count, fps = counts_of(video)
        total = facts.num_frames
        if count is not None and count > total and count != self._count:
            raise too_short(count, facts)
        if count is None and fps is not None:
            count = max(1, int(total / (facts.fps or USUAL_FPS) * fps))
        count = min(count or self._count, total)
        return [index * total // count for index in range(count)]

    def _size(self, clip: Clip, video: JsonObject) -> Size:
        return fitted_size(clip.facts.size, self._patch * self._square, budget_of(video, _VIDEO_BUDGET))

    def _prepared(self, clip: Clip, pixels: NDArray[np.uint8], video: JsonObject) -> Prepared:
        side = self._patch * self._square
        each = pixels.shape[1] * pixels.shape[2] // side**2
        shape = np.array([self._patch, budget_of(video, _VIDEO_BUDGET) * self._square**2], np.int64)
        arrays: Arrays = {PIXELS: pixels, TABLE: self._table, SHAPE: shape}
        rate = clip.facts.fps or USUAL_FPS
        text = " ".join(f"{clock(index / rate)} {self._frame}" for index in clip.indices)
        runs = (Placeholders(((self.placeholder, each),)),) * len(pixels)
        return Prepared(arrays, text, runs, both_ways=self._both_ways)


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, 01:05."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _in_patches(
    pixels: NDArray[np.uint8], table: NDArray[np.float32], side: int, most: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the patches [n', p * p * 3] of an image, and their columns and rows [n', 2]."""
    floats = np.empty(pixels.shape, np.float32)
    for channel in range(3):
        floats[..., channel] = table[channel][pixels[..., channel]]
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    blocks = floats.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    values = np.zeros((most, side * side * 3), np.float32)
    values[: rows * columns] = blocks.reshape(rows * columns, -1)
    places = np.full((most, 2), -1, np.int64)
    down, across = np.divmod(np.arange(rows * columns), columns)
    places[: rows * columns] = np.stack((across, down), 1)
    return values, places


def unnormalized(image: JsonObject) -> JsonObject:
    """Return the options of a processor that only scales values to [0, 1]."""
    return image.with_values(do_normalize=True, image_mean=list(_ZEROS), image_std=list(_ONES))


def budget_of(image: JsonObject, usual: int = 280) -> int:
    """Return the most embeddings of an image or a frame. Raises StartupError: they are none of `BUDGETS`."""
    budget = image.integer(BUDGET, usual)
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
