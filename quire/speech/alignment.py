# SPDX-License-Identifier: Apache-2.0
"""Times of a window's tokens: the request for them, as it travels to the engine core, and dynamic time warping.

The frames are those that a decoder attends to (Sakoe and Chiba, 1978; as in Whisper, Radford et al., 2022,
arXiv:2212.04356). Shapes: N tokens, M frames of the encoder's output.
"""

from __future__ import annotations

import base64

import msgspec
import numpy as np
from numpy.typing import NDArray

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


DIAGONAL, DOWN, RIGHT = 0, 1, 2


def first_frames(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the first frame [N] of each token, from the attention of tokens to frames [N, M], M >= 1."""
    moves = _moves(-weights.astype(np.float64))
    frames = np.zeros(len(weights), dtype=np.int64)
    row, column = (size - 1 for size in weights.shape)
    while row > 0 or column > 0:
        frames[row] = column
        move = RIGHT if row == 0 else DOWN if column == 0 else moves[row + column, row]
        row -= move != RIGHT
        column -= move != DOWN
    frames[0] = 0
    return frames


def _moves(costs: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the last move of the cheapest path to each cell (i, j) of costs [N, M], at [i + j, i].

    Cells of one antidiagonal depend on the two before it alone, so each is computed at once. Of equal moves a step to
    the right is taken. Sums are rounded to float32, as in Whisper's.
    """
    num_rows, num_columns = costs.shape
    num_diagonals = num_rows + num_columns - 1
    moves = np.full((num_diagonals, num_rows), RIGHT, dtype=np.uint8)
    # A cell of row i is at i + 1: place 0 stands for the row above the first.
    before = np.full(num_rows + 1, np.inf, dtype=np.float32)
    last = np.full(num_rows + 1, np.inf, dtype=np.float32)
    before[0] = 0.0  # the path begins left above the first cell
    for number in range(num_diagonals):
        rows = np.arange(max(0, number - num_columns + 1), min(num_rows, number + 1))
        diagonal, down, right = before[rows], last[rows], last[rows + 1]
        is_diagonal = (diagonal < down) & (diagonal < right)
        is_down = (down < diagonal) & (down < right)
        moves[number, rows] = np.where(is_diagonal, DIAGONAL, np.where(is_down, DOWN, RIGHT))
        cheapest = np.where(is_diagonal, diagonal, np.where(is_down, down, right))
        before, last = last, np.full_like(last, np.inf)
        last[rows + 1] = (costs[rows, number - rows] + cheapest).astype(np.float32)
    return moves
