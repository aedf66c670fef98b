# SPDX-License-Identifier: Apache-2.0
"""Interface of processors of videos: frames to sample, and frames to arrays and placeholders.

Invariant: frames come and are resized one at a time, so a video never is in memory in its own size. Arrays hold uint8
pixels after resizing. Pixels and frames are those of transformers' video processors, which run on torchvision.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import (
    MAX_PREPARED_PIXELS,
    OPTIONS_FIELD,
    Prepared,
    Size,
    request_errors,
    request_options,
)
from quire.multimodal.processors.files import ProcessorFiles
from quire.multimodal.processors.resampling import filter_of, fused_table, resampled

USUAL_FPS = 24.0  # Of videos that do not say, as transformers has it.
MAX_FRAMES = 1024


@dataclass(frozen=True)
class VideoFacts:
    """Facts of a video before its frames are sampled.

    Args:
        num_frames: all of them.
        size: (height, width) of a frame.
        fps: frames per second; 0: unknown.
        is_encoded: the frames come from a file, which has all there were; else from an array of the caller's choice.
        chosen: indices in the whole video of an array's frames, if the caller has sampled them.
    """

    num_frames: int
    size: Size
    fps: float = 0.0
    is_encoded: bool = True
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Clip:
    """Frames that were sampled from a video, by index; an array that is sampled already has `reads` of its own."""

    facts: VideoFacts
    indices: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the frames in the file or array, ascending."""
        return self.indices if self.facts.chosen is None else tuple(range(len(self.indices)))

    @property
    def sampled_fps(self) -> float:
        """Frames per second of the sampled ones."""
        facts = self.facts
        return len(self.indices) / facts.num_frames * facts.fps if facts.fps else USUAL_FPS


class VideoProcessor(abc.ABC):
    """Processor of the videos of one checkpoint.

    Attributes:
        marker: text that a chat template writes for a video; one token.
        placeholder: the token that takes an embedding.
    """

    OPTIONS = frozenset({"fps", "num_frames", "do_sample_frames", "size"})
    """Options that a request may set."""
    marker: str
    placeholder: str

    def __init__(
        self,
        files: ProcessorFiles,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        resample: int,
    ) -> None:
        self._video = video = files.video
        video.only("do_resize", True)
        self._table = fused_table(video, mean, std)
        self._resample = filter_of(video, resample)
        self.placeholder = self.marker = files.token("video_token", self.usual_token)

    usual_token = "<|video_pad|>"
    samples_arrays = False
    """Arrays of frames are sampled, too, unless the options say otherwise."""

    def sample(self, facts: VideoFacts, options: Mapping[str, Any]) -> Clip:
        """Return the frames to read of a video.

        Raises:
            ValidationError: an option is not possible for this video, or there are too many frames.
        """
        with request_errors():
            video = self._with(options)
            if wants_sampling(facts, video, usually=self.samples_arrays):
                indices = self._sampled(facts, video)
            else:
                indices = list(facts.chosen or range(facts.num_frames))
        if not 0 < len(indices) <= MAX_FRAMES:
            raise ValidationError(
                f"{len(indices)} frames would be read of the video's {facts.num_frames}, the limit is {MAX_FRAMES}; "
                f"set fps or num_frames in {OPTIONS_FIELD}",
                param=OPTIONS_FIELD,
            )
        last = facts.num_frames - 1
        return Clip(facts, tuple(min(index, last) for index in indices))

    @abc.abstractmethod
    def prepare(
        self, clip: Clip, frames: Iterable[NDArray[np.uint8]], options: Mapping[str, Any]
    ) -> Prepared:
        """Process the frames [H, W, 3] of a clip, in order.

        Raises:
            ValidationError: the video or an option is not possible for this model.
        """

    def _with(self, options: Mapping[str, Any]) -> JsonObject:
        """Return the checkpoint's options with a request's; a number of frames replaces a rate, and a rate a number."""
        others = {"num_frames": "fps", "fps": "num_frames"}
        replaced = {others[name]: None for name in options if name in others}
        return request_options(self._video, {**replaced, **options})

    @abc.abstractmethod
    def _sampled(self, facts: VideoFacts, video: JsonObject) -> list[int]:
        """Return the indices of the frames to read."""


class ResizedVideos(VideoProcessor):
    """Processor that gives all frames of a video one size."""

    def prepare(
        self, clip: Clip, frames: Iterable[NDArray[np.uint8]], options: Mapping[str, Any]
    ) -> Prepared:
        """See `VideoProcessor.prepare`."""
        with request_errors():
            video = self._with(options)
            size = self._size(clip, video)
        check_video_pixels(len(clip.indices), size)
        pixels = np.empty((len(clip.indices), *size, 3), np.uint8)
        for place, frame in zip(pixels, frames, strict=True):
            place[:] = resampled(frame, size, self._resample)
        return self._prepared(clip, pixels, video)

    @abc.abstractmethod
    def _size(self, clip: Clip, video: JsonObject) -> Size:
        """Return the (height, width) to which frames are resized."""

    @abc.abstractmethod
    def _prepared(self, clip: Clip, pixels: NDArray[np.uint8], video: JsonObject) -> Prepared:
        """Return the arrays and placeholders of resized frames [T, H, W, 3]; `video` has been read by `_size`."""


def check_video_pixels(num_frames: int, size: Size) -> None:
    """Raise ValidationError if a video would be resized to more pixels than are allowed."""
    if num_frames * size[0] * size[1] > MAX_PREPARED_PIXELS:
        raise ValidationError(
            f"the video would be resized to {num_frames} frames of {size[1]} x {size[0]} pixels, more than the limit "
            f"of {MAX_PREPARED_PIXELS}; set fewer frames or a smaller size in {OPTIONS_FIELD}",
            param=OPTIONS_FIELD,
        )


def wants_sampling(facts: VideoFacts, video: JsonObject, *, usually: bool) -> bool:
    """Return whether frames are sampled: if the options say so, and of a file in any case."""
    return facts.is_encoded or (facts.chosen is None and video.flag("do_sample_frames", usually))


def counts_of(video: JsonObject) -> tuple[int | None, float | None]:
    """Return `num_frames` and `fps`, of which one at most is set."""
    count, fps = video.optional_integer("num_frames"), video.optional_number("fps", low=1e-3)
    if count is not None and fps is not None:
        raise video.wrong("num_frames", "absent if fps is set")
    return count, fps


def too_short(num_frames: int, facts: VideoFacts) -> ValidationError:
    """Return the error of a video with fewer frames than are asked for."""
    return ValidationError(
        f"num_frames is {num_frames}, and the video has {facts.num_frames} frames", param=OPTIONS_FIELD
    )
