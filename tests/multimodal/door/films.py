# SPDX-License-Identifier: Apache-2.0
"""Videos in files, made by PyAV."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def drawn_frames(count: int, size: tuple[int, int] = (48, 64), seed: int = 0) -> NDArray[np.uint8]:
    """Frames [T, H, W, 3] of slow gradients, which codecs keep nearly as they are."""
    height, width = size
    down, across = np.mgrid[0:height, 0:width]
    frames = [np.stack([down + 3 * t, across + 2 * t, down + across + seed * 9], -1) for t in range(count)]
    return np.stack(frames).astype(np.uint8)


def film(
    frames: NDArray[np.uint8], fps: int = 10, container: str = "mp4", codec: str = "mpeg4", **options: Any
) -> bytes:
    """Return the file of some frames."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=fps, options=options.pop("options", {}))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = options.pop("pix_fmt", "yuv420p")
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return target.getvalue()
