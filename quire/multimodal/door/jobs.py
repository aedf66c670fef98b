# SPDX-License-Identifier: Apache-2.0
"""Messages between the door and its decoding processes."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.multimodal.door.layout import PlaceholderLayout


class DecodeSetup(msgspec.Struct, frozen=True):
    """Processor of a decoding process, and its memory beyond what it needs to start."""

    architecture: str
    model_dir: str
    options: dict[str, Any]
    memory_bytes: int


class DecodeJob(msgspec.Struct, frozen=True):
    """One item to process.

    Args:
        kind: "image", "raw" (RGB pixels), "video", "frames" (RGB pixels), "audio" or "embeds".
        input, output: files of the item's bytes and of its arrays.
        options: the request's, checked.
        max_pixels: most pixels that its header may state, or that may be read of a video.
        size: (width, height) of raw pixels; (frames, height, width) of raw frames.
        hidden_size: of embeddings.
        fps: of raw frames; 0: unknown.
        num_frames: of the video of raw frames; 0: as many as there are.
        chosen: indices of raw frames in that video, if the caller sampled them.
        max_seconds: longest sound.
    """

    kind: str
    input: str
    output: str
    options: dict[str, Any]
    max_pixels: int
    size: tuple[int, ...] = ()
    hidden_size: int = 0
    fps: float = 0.0
    num_frames: int = 0
    chosen: tuple[int, ...] | None = None
    max_seconds: float = 0.0


class DecodeReply(msgspec.Struct, frozen=True):
    """Result of a job: a layout and the size of the file, or an error for the client."""

    layout: PlaceholderLayout | None = None
    num_bytes: int = 0
    error: str = ""
    param: str = ""
