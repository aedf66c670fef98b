# SPDX-License-Identifier: Apache-2.0
"""Sizes of images in tiles of any resolution, as LLaVA-NeXT (2024) cuts and reads them.

Invariant: the processor counts placeholders and the tower reads embeddings by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import Size

RATIO = 1.1
MAX_PINPOINTS = 1024
MAX_SIDE = 2**14


def pinpoints_of(config: JsonObject, usual: Sequence[Size]) -> tuple[Size, ...]:
    """Return the sizes in which an image may be shown.

    Raises:
        StartupError: the list is malformed.
    """
    given: Any = config.get("image_grid_pinpoints")
    if given is None:
        return tuple(usual)
    is_right = isinstance(given, list) and 0 < len(given) <= MAX_PINPOINTS and all(map(_is_size, given))
    if not is_right:
        raise config.wrong("image_grid_pinpoints", f"a list of at most {MAX_PINPOINTS} pairs of sides")
    return tuple((height, width) for height, width in given)


def _is_size(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2
    return is_pair and all(type(side) is int and 0 < side <= MAX_SIDE for side in pair)


def best_resolution(size: Size, pinpoints: Sequence[Size]) -> Size:
    """Return the (height, width) that shows most of an image, and of equal ones the smallest."""
    found, most, least = pinpoints[0], 0, math.inf
    for height, width in pinpoints:
        scale = min(width / size[1], height / size[0])
        shown = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        wasted = height * width - shown
        if shown > most or (shown == most and wasted < least):
            found, most, least = (height, width), shown, wasted
    return found


def fitted(size: Size, target: Size) -> Size:
    """Return the (height, width) of an image that fills one side of the target."""
    across, down = target[1] / size[1], target[0] / size[0]
    if across < down:
        return min(math.ceil(size[0] * across), target[0]), target[1]
    return target[0], min(math.ceil(size[1] * down), target[1])


def unpadded(size: Size, grid: Size) -> tuple[int, int]:
    """Return the rows and columns at each edge of a grid of features that show no part of an image."""
    rows, columns = grid
    if size[1] / size[0] > columns / rows:
        return (rows - int(round(size[0] * (columns / size[1]), 7))) // 2, 0
    return 0, (columns - int(round(size[1] * (rows / size[0]), 7))) // 2


def shown_grid(size: Size, grid: Size) -> Size:
    """Return (rows, columns) of the features that show a part of an image."""
    rows, columns = unpadded(size, grid)
    return grid[0] - 2 * rows, grid[1] - 2 * columns


def most_tiles(config: JsonObject) -> int | None:
    """Return the number of tiles whose features an image may have, of `anyres_max_9`; None: any number."""
    text = config.text("vision_aspect_ratio", "anyres_max_9")
    number = text.removeprefix("anyres_max_")
    if number == text or not number.isdecimal() or not 0 < int(number) <= MAX_PINPOINTS:
        raise config.unsupported("vision_aspect_ratio", "anyres_max_ and a number")
    return int(number)


def shrunk(grid: Size, tiles: int | None, side: int) -> Size:
    """Return (rows, columns) within the features of so many tiles, each of `side` x `side`."""
    if tiles is None:
        return grid
    ratio = math.sqrt(grid[0] * grid[1] / (tiles * side**2))
    return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > RATIO else grid
