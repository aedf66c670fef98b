# SPDX-License-Identifier: Apache-2.0
"""Request for the times of a window's tokens, as it travels to the engine core."""

from __future__ import annotations

import base64

import msgspec
import numpy as np

from quire.speech.warping import first_frames

FRAME_S = 0.02
UTILITY = "align_speech"
"""Utility of the engine core: (alignment, its item) -> weights."""


class Alignment(msgspec.Struct, frozen=True):
    """Decoder's tokens of a finished window.

    Args:
        prompt: ids before the transcript.
        tokens: of the transcript, timestamps among them.
        num_frames: frames of the spectrogram that are sound, 0.01 s each.
        heads: (layer, head) whose attention follows the sound.
        median_width: frames of the median filter, odd.
    """

    prompt: list[int]
    tokens: list[int]
    num_frames: int
    heads: list[tuple[int, int]]
    median_width: int


class AlignmentWeights(msgspec.Struct, frozen=True):
    """Attention of tokens to frames: float32, row by row, in base64."""

    num_tokens: int
    data: str


def pack(weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> AlignmentWeights:
    """Pack weights [T, M] for the way to the front end."""
    return AlignmentWeights(len(weights), base64.b64encode(weights.tobytes()).decode())


def token_times(packed: object) -> list[float]:
    """Return the start of each token, in seconds of its window, from packed weights."""
    weights = msgspec.convert(packed, AlignmentWeights)
    flat = np.frombuffer(base64.b64decode(weights.data), dtype=np.float32)
    return [
        round(FRAME_S * frame, 2) for frame in first_frames(flat.reshape(weights.num_tokens, -1)).tolist()
    ]
