# SPDX-License-Identifier: Apache-2.0
"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pairs of frames in patches.

Papers: Qwen2-VL (2409.12191), Qwen2.5-VL (2502.13923). A video of the first two is one run of placeholders; Qwen3-VL
has a run for each pair of frames, after its time as text.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import Arrays, Placeholders, Prepared, Size
from quire.multimodal.processors.files import ProcessorFiles
from quire.multimodal.processors.pixels import BICUBIC, CLIP_MEAN, CLIP_STD, HALVES, PIXELS, TABLE
from quire.multimodal.processors.qwen_vl import PATCH, QwenVLProcessor, rounded_size
from quire.multimodal.processors.video import (
    USUAL_FPS,
    Clip,
    ResizedVideos,
    VideoFacts,
    counts_of,
    too_short,
)

ENCODED_FPS = 2.0  # Of a file, where neither the checkpoint nor the request says: the models' training.
BUDGET = 0.9  # Part of `max_video_tokens` that frames of a capped video share.
FLOOR = 1.05


class Qwen2VLVideos(ResizedVideos):
    """Processor whose frames have a number of pixels within limits each."""

    OPTIONS = ResizedVideos.OPTIONS | {"min_frames", "max_frames", "min_pixels", "max_pixels"}
    patch_size = 14
    sizes = (128 * 28 * 28, 28 * 28 * 768)
    """Usual least and most pixels."""
    max_tokens = 128_000
    mean, std = CLIP_MEAN, CLIP_STD

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files, self.mean, self.std, BICUBIC)
        video = self._video
        self._patch = video.integer("patch_size", self.patch_size)
        self._merge = video.integer("merge_size", 2)
        self._frames = video.integer("temporal_patch_size", 2)
        self._factor = self._patch * self._merge
        self._most_tokens = video.integer("max_video_tokens", self.max_tokens)
        self._start = files.token("vision_start_token", "<|vision_start|>")
        self._end = files.token("vision_end_token", "<|vision_end|>")

    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        count, fps = counts_of(video)
        total, unit = facts.num_frames, self._frames
        if count is not None:
            count = round(count / unit) * unit
        elif fps is not None or facts.is_encoded:
            most = min(video.integer("max_frames", 768), total) // unit * unit
            wanted = total / (facts.fps or USUAL_FPS) * (fps or ENCODED_FPS)
            count = math.floor(min(max(wanted, video.integer("min_frames", 4)), most, total) / unit) * unit
        if count is None or (count == 0 and total < unit):
            return list(range(total))
        if not 0 < count <= total:
            raise too_short(count, facts)
        step = total / count
        places = np.arange(math.ceil(total / step)) * step
        return list(map(int, places.astype(np.float32)))

    def _size(self, clip: Clip, video: JsonObject) -> Size:
        least, most = self._limits(video)
        if video.flag("cap_pixels_per_frame", False):
            budget = int(self._most_tokens * self._factor**2 * BUDGET) * self._frames
            most = max(min(most, budget // len(clip.indices)), int(least * FLOOR))
        return rounded_size(clip.facts.size, self._factor, least, most)

    def _limits(self, video: JsonObject) -> tuple[int, int]:
        """Return the least and the most pixels."""
        size = video.child("size")
        least = video.integer("min_pixels", size.integer("shortest_edge", self.sizes[0]))
        most = video.integer("max_pixels", size.integer("longest_edge", self.sizes[1]))
        if least > most:
            raise video.wrong("min_pixels", f"at most max_pixels, which is {most}")
        return least, most

    def _prepared(self, clip: Clip, pixels: NDArray[np.uint8], video: JsonObject) -> Prepared:
        frames = -(-len(pixels) // self._frames)
        rows, columns = (side // self._factor for side in pixels.shape[1:3])
        patch = np.array([self._patch, self._merge, self._frames], np.int64)
        text, runs = self._placeholders(clip, frames, rows * columns)
        arrays: Arrays = {PIXELS: pixels, TABLE: self._table, PATCH: patch}
        seconds = self._seconds(clip)
        return Prepared(arrays, text, runs, grid=(frames, rows, columns), seconds_per_frame=seconds)

    def _placeholders(self, clip: Clip, frames: int, each: int) -> tuple[str, tuple[Placeholders, ...]]:
        """Return the text and the runs of so many pairs of frames with `each` embeddings."""
        return self.placeholder, (Placeholders(((self.placeholder, frames * each),)),)

    def _seconds(self, clip: Clip) -> float:
        """Return the seconds between two pairs of frames, for a model that rotates by them; else 0."""
        return 0.0


class Qwen25VLVideos(Qwen2VLVideos):
    """Processor for a model that rotates by time."""

    def _seconds(self, clip: Clip) -> float:
        return self._frames / clip.sampled_fps


class Qwen3VLVideos(Qwen2VLVideos):
    """Processor whose limits of pixels cover all frames, with a time before each pair of them."""

    OPTIONS = ResizedVideos.OPTIONS
    samples_arrays = True
    patch_size = 16
    sizes = (128 * 32 * 32, 32 * 32 * 768)
    max_tokens = 768
    mean, std = HALVES, HALVES

    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        total = facts.num_frames
        least, most = video.integer("min_frames", 4), video.integer("max_frames", 768)
        count, fps = counts_of(video)
        if count is None:
            count = int(total / (facts.fps or USUAL_FPS) * (fps or ENCODED_FPS))
            count = min(max(count, least), most, total)
        return list(map(int, np.linspace(0, total - 1, count).round()))

    def _size(self, clip: Clip, video: JsonObject) -> Size:
        count, unit, factor = len(clip.indices), self._frames, self._factor
        if count < unit:
            raise ValidationError(
                f"{count} frame of the video would be read, and this model takes {unit} at least",
                param="messages",
            )
        least, most = self._limits(video)
        if video.flag("cap_pixels_per_frame", False):
            each = min(self._most_tokens * factor**2, most // count)
            most = max(each, int(least * FLOOR)) * count
        height, width = clip.facts.size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return volume_size((height, width), count, unit, factor, least, most)

    def _placeholders(self, clip: Clip, frames: int, each: int) -> tuple[str, tuple[Placeholders, ...]]:
        times = self._times(clip)
        block = f"{self._start}{self.placeholder}{self._end}"
        text = "".join(f"<{time:.1f} seconds>{block}" for time in times)
        return text, (Placeholders(((self.placeholder, each),)),) * frames

    def _times(self, clip: Clip) -> list[float]:
        """Return the middle of each pair of frames, in seconds."""
        indices, unit = list(clip.indices), self._frames
        indices += indices[-1:] * (-len(indices) % unit)
        seconds = [index / (clip.facts.fps or USUAL_FPS) for index in indices]
        return [(seconds[at] + seconds[at + unit - 1]) / 2 for at in range(0, len(seconds), unit)]


def volume_size(size: Size, count: int, unit: int, factor: int, least: int, most: int) -> Size:
    """Return (height, width) in multiples of `factor` so that `count` frames have a number of pixels within the limits.

    Raises:
        ValidationError: one side is too long for the other.
    """
    height, width = rounded_size(size, factor, 0, 2**62)
    volume = round(count / unit) * unit * height * width
    area = count * size[0] * size[1]
    if volume > most:
        shrink = math.sqrt(area / most)
        height, width = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif volume < least:
        grow = math.sqrt(least / area)
        height, width = (math.ceil(side * grow / factor) * factor for side in size)
    return height, width


class Qwen2VLProcessor(QwenVLProcessor):
    """Images and videos of Qwen2-VL."""

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.videos = self.video_kind(files)

    video_kind: type[Qwen2VLVideos] = Qwen2VLVideos


class Qwen25VLProcessor(Qwen2VLProcessor):
    """Images and videos of Qwen2.5-VL."""

    video_kind = Qwen25VLVideos


class Qwen3VLProcessor(Qwen2VLProcessor):
    """Images and videos of Qwen3-VL and Qwen3.5."""

    video_kind = Qwen3VLVideos
