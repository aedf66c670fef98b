# SPDX-License-Identifier: Apache-2.0
"""Videos that callers of this process pass as frames: arrays, lists of images, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.errors import ValidationError
from quire.multimodal.arrays import array_of
from quire.multimodal.processors.pixels import as_rgb

METADATA = ("fps", "duration", "total_num_frames", "frames_indices", "video_backend", "width", "height")
FORM = "uint8 frames [T, H, W, 3], a list of PIL images, a path or a URL"


@dataclass(frozen=True)
class FrameFacts:
    """Facts of frames in the video that they are from; see `DecodeJob`."""

    fps: float = 0.0
    num_frames: int = 0
    chosen: tuple[int, ...] | None = None


def read_frames(source: Any, where: str) -> tuple[NDArray[np.uint8], FrameFacts]:
    """Return uint8 [T, H, W, 3] and the facts of frames, or of a pair of frames and a dict of metadata.

    Raises:
        ValidationError: the value has another form; names the field.
    """
    metadata: Any = {}
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping | None):
        source, metadata = source[0], source[1] or {}
    if isinstance(source, list | tuple) and source and all(isinstance(each, Image.Image) for each in source):
        source = _stacked(source, where)
    frames = array_of(source)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        got = (
            f"{frames.dtype} {list(frames.shape)}"
            if isinstance(source, np.ndarray)
            else type(source).__name__
        )
        raise ValidationError(f"{where} must be {FORM}, got {got}", param=where)
    return frames, _facts(metadata, len(frames), where)


def _stacked(images: Any, where: str) -> NDArray[np.uint8]:
    if len({image.size for image in images}) != 1:
        raise ValidationError(f"{where} has frames of different sizes", param=where)
    return np.stack([np.asarray(as_rgb(image)) for image in images])


def _facts(metadata: Mapping[str, Any], count: int, where: str) -> FrameFacts:
    """Return the checked metadata of `count` frames."""
    if unknown := metadata.keys() - set(METADATA):
        raise ValidationError(
            f"the metadata of {where} have {min(unknown)!r}; known are {', '.join(METADATA)}", param=where
        )
    fps, total, indices = (metadata.get(name) for name in ("fps", "total_num_frames", "frames_indices"))
    total = count if total is None else total
    if not (fps is None or (isinstance(fps, int | float) and 0 < fps < 10_000)):
        raise ValidationError(f"fps of {where} must be a number above 0, got {fps!r:.40}", param=where)
    if not isinstance(total, int) or total < count or (indices is None and total != count):
        raise ValidationError(
            f"total_num_frames of {where} must be {count}, or more beside frames_indices, got {total!r:.40}",
            param=where,
        )
    return FrameFacts(float(fps or 0.0), total, _indices(indices, count, total, where))


def _indices(given: Any, count: int, total: int, where: str) -> tuple[int, ...] | None:
    if given is None:
        return None
    indices = np.asarray(given)
    is_right = indices.shape == (count,) and indices.dtype.kind in "iu"
    if not is_right or (np.diff(indices) < 0).any() or not 0 <= indices[0] <= indices[-1] < total:
        raise ValidationError(
            f"frames_indices of {where} must be {count} ascending numbers below {total}", param=where
        )
    return tuple(map(int, indices))
