# SPDX-License-Identifier: Apache-2.0
"""Decoding of untrusted videos with PyAV, in a process that may crash.

Invariant: the container is one of `CONTAINERS`, by its first bytes, and its codec one of `CODECS`; nothing that a file
names is opened. Frames are decoded one at a time, after their number and size were checked. A file's statements about
its length are not trusted: packets are counted.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ClientError, ValidationError
from quire.multimodal.door.decoding import MAX_PIXELS, check_size
from quire.multimodal.processors.base import Prepared
from quire.multimodal.processors.video import Clip, VideoFacts, VideoProcessor

CONTAINERS = {
    "mov": (re.compile(rb".{4}ftyp", re.DOTALL), "MP4 or MOV"),
    "matroska": (re.compile(rb"\x1aE\xdf\xa3"), "WebM or MKV"),
    "avi": (re.compile(rb"RIFF.{4}AVI ", re.DOTALL), "AVI"),
    "gif": (re.compile(rb"GIF8[79]a"), "GIF"),
}
"""FFmpeg's name of a container -> its first bytes and its common name."""
CODECS = frozenset(
    {"h264", "hevc", "av1", "libdav1d", "vp8", "libvpx", "vp9", "libvpx-vp9", "mpeg4", "mjpeg", "gif"}
)
OPTIONS = {"protocol_whitelist": "none"}  # Of FFmpeg: no file or address is opened.
MAX_PACKETS = 2**20
MAX_VIDEO_PIXELS = 2**31
"""Most pixels of all frames that are read of a video, in its own size: some 1,000 frames of 1080 lines."""


@dataclass(frozen=True)
class DecodedVideo:
    """Processed video, and the pixels of its frames in their own size."""

    prepared: Prepared
    num_pixels: int


def read_video(
    content: bytes, videos: VideoProcessor, options: Mapping[str, Any], max_pixels: int
) -> DecodedVideo:
    """Sample, decode and process an encoded video.

    Raises:
        ValidationError: it is no video of a known format, damaged, too large or not possible for the model.
        MemoryError: decoding it needs too much memory.
    """
    av = importlib.import_module("av")  # an extra
    name = _container(content)
    try:
        facts = _facts(av, content, name)
        try:
            return _read(av, content, name, facts, videos, options, max_pixels)
        except _FewerFramesError as error:  # packets without a frame, or a damaged end
            found = VideoFacts(error.num_frames, facts.size, facts.fps)
            return _read(av, content, name, found, videos, options, max_pixels)
    except ClientError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, ZeroDivisionError, _FewerFramesError) as error:
        raise ValidationError(
            f"the {CONTAINERS[name][1]} file is damaged or cut off: {type(error).__name__}"
        ) from None


class _FewerFramesError(Exception):
    """Raised when a video ends before its last packet gave a frame."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(num_frames)
        self.num_frames = num_frames


def _container(content: bytes) -> str:
    if not content:
        raise ValidationError("the video is empty: it has no bytes")
    for name, (beginning, _) in CONTAINERS.items():
        if beginning.match(content):
            return name
    known = ", ".join(common for _, common in CONTAINERS.values())
    raise ValidationError(f"the bytes are no video; formats are {known}")


def _opened(av: Any, content: bytes, name: str) -> tuple[Any, Any]:
    """Return the container and its video stream."""
    container = av.open(
        io.BytesIO(content),
        format=name,
        container_options=OPTIONS,
        metadata_errors="ignore",
        io_open=_refuse_to_open,
    )
    if not container.streams.video:
        container.close()
        raise ValidationError("the file has no video stream")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None or context.codec.name not in CODECS:
        container.close()
        got = "unknown" if context is None else context.codec.name
        raise ValidationError(f"the video's codec is {got:.40}; codecs are {', '.join(sorted(CODECS))}")
    context.thread_count = 1
    return container, stream


def _refuse_to_open(*_: Any) -> Any:
    raise ValueError("a video is one file")


def _facts(av: Any, content: bytes, name: str) -> VideoFacts:
    container, stream = _opened(av, content, name)
    with container:
        rate = stream.average_rate or stream.guessed_rate or Fraction(0)
        count = 0
        for packet in container.demux(stream):
            count += bool(packet.size) and not packet.is_discard
            if count > MAX_PACKETS:
                raise ValidationError(f"the video has more than {MAX_PACKETS} frames")
    if not count:
        raise ValidationError("the video has no frames")
    return VideoFacts(count, _size(av, content, name), float(rate) if 0 < rate < 10_000 else 0.0)


def _size(av: Any, content: bytes, name: str) -> tuple[int, int]:
    """Return (height, width) of the first frame, upright."""
    container, stream = _opened(av, content, name)
    with container:
        check_size(stream.width, stream.height, MAX_PIXELS, "video")
        for frame in container.decode(stream):
            check_size(frame.width, frame.height, MAX_PIXELS, "video")
            height, width, _ = _pixels(frame).shape
            return height, width
    raise ValidationError("the video has no frames")


def _read(
    av: Any,
    content: bytes,
    name: str,
    facts: VideoFacts,
    videos: VideoProcessor,
    options: Mapping[str, Any],
    max_pixels: int,
) -> DecodedVideo:
    clip = videos.sample(facts, options)
    num_pixels = len(clip.indices) * facts.size[0] * facts.size[1]
    if num_pixels > max_pixels:
        raise ValidationError(
            f"{len(clip.indices)} frames of {facts.size[1]} x {facts.size[0]} pixels would be read, over the limit "
            f"of {max_pixels} pixels that is left of the request's; set fewer in mm_processor_kwargs"
        )
    container, stream = _opened(av, content, name)
    with container:
        return DecodedVideo(videos.prepare(clip, _frames(container, stream, clip), options), num_pixels)


def _frames(container: Any, stream: Any, clip: Clip) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of a clip, RGB."""
    wanted = iter(clip.indices)
    index = next(wanted, None)
    number = 0
    for number, frame in enumerate(container.decode(stream), 1):
        pixels = None
        while index == number - 1:
            if pixels is None:
                pixels = _pixels(frame)
                if pixels.shape[:2] != clip.facts.size:
                    raise ValidationError("the video's frames have different sizes")
            yield pixels
            index = next(wanted, None)
        if index is None:
            return
    raise _FewerFramesError(number)


def _pixels(frame: Any) -> NDArray[np.uint8]:
    """Return [H, W, 3] of a frame, turned as its stream says."""
    check_size(frame.width, frame.height, MAX_PIXELS, "video")
    turns = round(frame.rotation / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)
