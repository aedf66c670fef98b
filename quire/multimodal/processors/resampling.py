# SPDX-License-Identifier: Apache-2.0
"""Resizing of uint8 pixels with the bits of torchvision, for processors that transformers has on torchvision only.

torch resizes uint8 in two passes, rows first, and rounds in between. The weights of a pass are 16-bit integers with a
common power of two. Sums of such products are integers, so a matrix product in floating point is exact in any order
as long as they stay below its mantissa.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import Size
from quire.multimodal.processors.pixels import BICUBIC, BILINEAR, FACTOR, stats_of

Floats = NDArray[np.float64]
WEIGHT_BITS, MOST_PRECISION = 15, 22
BLOCK = 64  # Outputs of one matrix product: their inputs overlap.
EXACT_FLOAT32 = 2**24
CUBIC = -0.5


def _triangle(x: Floats) -> Floats:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _cubic(x: Floats) -> Floats:
    x = np.abs(x)
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


FILTERS: dict[int, tuple[Callable[[Floats], Floats], float]] = {
    BILINEAR: (_triangle, 1.0),
    BICUBIC: (_cubic, 2.0),
}
"""Pillow's number of a filter -> the filter and the radius of its support."""


@dataclass(frozen=True)
class _Block:
    """Weights [n, inputs] of the outputs [first, first + n), which read the inputs from `start` on."""

    first: int
    start: int
    weights: NDArray[Any]


@dataclass(frozen=True)
class _Axis:
    blocks: tuple[_Block, ...]
    precision: int


@lru_cache(maxsize=64)
def _axis(inputs: int, outputs: int, resample: int) -> _Axis:
    """Return the weights of one pass."""
    weights, starts = _weights(inputs, outputs, resample)
    precision = _precision(float(weights.max()))
    whole = np.trunc(weights * 2.0**precision + np.copysign(0.5, weights))
    is_small = np.abs(whole).sum(1).max() * 255 + 2.0 ** max(precision - 1, 0) < EXACT_FLOAT32
    dtype = np.float32 if is_small else np.float64
    blocks = []
    for first in range(0, outputs, BLOCK):
        own = slice(first, min(first + BLOCK, outputs))
        start, end = int(starts[own].min()), int(starts[own].max()) + weights.shape[1]
        placed = np.zeros((own.stop - first, end - start), dtype)
        columns = starts[own, None] - start + np.arange(weights.shape[1])
        np.put_along_axis(placed, columns, whole[own].astype(dtype), 1)
        blocks.append(_Block(first, start, placed[:, : inputs - start]))
    return _Axis(tuple(blocks), precision)


def _weights(inputs: int, outputs: int, resample: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the weights [outputs, taps] of each output, zeros behind its own, and its first input."""
    function, radius = FILTERS[resample]
    scale = inputs / outputs
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(outputs) + 0.5)
    starts = np.maximum((centers - radius * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + radius * stretch + 0.5).astype(np.int64), inputs)
    taps = np.arange(int((ends - starts).max()))
    found = function((starts[:, None] + taps - centers[:, None] + 0.5) * (1.0 / stretch))
    found = np.where(taps < (ends - starts)[:, None], found, 0.0)
    return found / np.add.accumulate(found, 1)[:, -1:], starts


def _precision(largest: float) -> int:
    """Return the power of two by which weights become integers of 16 bits."""
    for precision in range(MOST_PRECISION):
        if int(0.5 + largest * (1 << (precision + 1))) >= 1 << WEIGHT_BITS:
            return precision
    return MOST_PRECISION


def _passed(rows: NDArray[np.uint8], axis: _Axis, outputs: int) -> NDArray[np.uint8]:
    """Return [outputs, m] of rows [inputs, m]."""
    found = np.empty((outputs, rows.shape[1]), np.uint8)
    half, unit = 2.0 ** (axis.precision - 1), 2.0**-axis.precision
    for block in axis.blocks:
        count, width = block.weights.shape
        sums = block.weights @ rows[block.start : block.start + width].astype(block.weights.dtype)
        np.floor((sums + half) * unit, out=sums)
        found[block.first : block.first + count] = np.clip(sums, 0, 255, out=sums)
    return found


def resampled(pixels: NDArray[np.uint8], size: Size, resample: int) -> NDArray[np.uint8]:
    """Return pixels [H, W, 3] with another (height, width)."""
    height, width, colors = pixels.shape
    if width != size[1]:
        across = pixels.transpose(1, 0, 2).reshape(width, -1)
        across = _passed(across, _axis(width, size[1], resample), size[1])
        pixels = across.reshape(size[1], height, colors).transpose(1, 0, 2)
    if height != size[0]:
        down = _passed(pixels.reshape(height, -1), _axis(height, size[0], resample), size[0])
        pixels = down.reshape(size[0], size[1], colors)
    return np.ascontiguousarray(pixels)


def filter_of(image: JsonObject, usual: int) -> int:
    """Return the filter of resizing. Raises StartupError if it is none of `FILTERS`."""
    resample = image.integer("resample", usual, low=0, high=5)
    if resample not in FILTERS:
        raise image.unsupported("resample", f"{BILINEAR} (bilinear) or {BICUBIC} (bicubic)")
    return resample


def fused_table(image: JsonObject, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the table [3, 256] of a processor on torchvision, whose mean and deviation are scaled, not its pixels.

    Without `do_normalize` pixels are scaled.

    Raises:
        StartupError: an option is malformed, or switches another step off.
    """
    if not image.flag("do_normalize", True):
        image.only("do_rescale", True)
        plain = np.arange(256, dtype=np.float32) * np.float32(image.number("rescale_factor", FACTOR))
        return np.tile(plain, (3, 1))
    means, stds = stats_of(image, mean, std)
    scale = np.float32(1.0 / image.number("rescale_factor", FACTOR))
    scaled_means, scaled_stds = (np.array(values, np.float32) * scale for values in (means, stds))
    values = np.arange(256, dtype=np.float32)
    table: NDArray[np.float32] = (values - scaled_means[:, None]) / scaled_stds[:, None]
    return table
