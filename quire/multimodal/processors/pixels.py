# SPDX-License-Identifier: Apache-2.0
"""Steps that processors share: colors, sizes, crops, and the table from uint8 to float32.

Invariant: with the same Pillow, each step gives the bits of transformers' Pillow backend. All steps before the table
work on uint8. The table has, for a channel and a value, the float32 of value x factor, minus the mean, over the
deviation, each rounded to float32; so a pixel is normalized by one look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import Arrays, Size

WHITE = (255, 255, 255, 255)
PIXELS, TABLE = "pixels", "table"  # Names of arrays: uint8 [..., H, W, 3] and float32 [3, 256].
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, LANCZOS = (int(Image.Resampling[name]) for name in ("BILINEAR", "BICUBIC", "LANCZOS"))
FACTOR = 1 / 255


def as_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, transparent parts over white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    """Return the image with another (height, width)."""
    return image.resize((size[1], size[0]), resample=Image.Resampling(resample))


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """Return uint8 [H, W, 3] of an RGB image."""
    return np.array(image)


def size_of(image: Image.Image) -> Size:
    """Return (height, width)."""
    return image.height, image.width


def with_short_side(size: Size, short: int) -> Size:
    """Return (height, width) whose shorter side is `short`, the other one in proportion, rounded down."""
    height, width = size
    long = int(short * max(size) / min(size))
    return (long, short) if width <= height else (short, long)


def cropped(pixels: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Return the center [h, w, 3] of an image; where the image is smaller, black surrounds it."""
    height, width = pixels.shape[:2]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + size[0], left : left + size[1]]
    room = (max(size[0], height), max(size[1], width))
    above, before = -(-(room[0] - height) // 2), -(-(room[1] - width) // 2)
    canvas = np.zeros((*room, 3), np.uint8)
    canvas[above : above + height, before : before + width] = pixels
    top, left = max(top + above, 0), max(left + before, 0)
    return canvas[top : top + size[0], left : left + size[1]]


def table_of(image: JsonObject, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the table [3, 256] of a checkpoint's image options; `mean` and `std` are its processor's own.

    Raises:
        StartupError: an option is malformed, or switches a step off.
    """
    means, stds = stats_of(image, mean, std)
    factor = image.number("rescale_factor", FACTOR)
    scaled = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)
    return (scaled - np.array(means, np.float32)[:, None]) / np.array(stds, np.float32)[:, None]


def stats_of(
    image: JsonObject, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of the channels; `mean` and `std` are the processor's own.

    Raises:
        StartupError: an option is malformed, or switches a step off.
    """
    for step in ("do_rescale", "do_normalize"):
        image.only(step, True)
    means, stds = (
        image.numbers(name) if name in image else usual
        for name, usual in (("image_mean", mean), ("image_std", std))
    )
    for name, values in (("image_mean", means), ("image_std", stds)):
        if len(values) != 3 or (name == "image_std" and not all(values)):
            raise image.wrong(name, "three numbers, for red, green and blue")
    return means, stds


def resample_of(image: JsonObject, usual: int) -> int:
    """Return the filter of resizing. Raises StartupError if it does not exist."""
    return image.integer("resample", usual, low=0, high=5)


def channels_first(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return float32 [..., 3, H, W] of `PIXELS` by `TABLE`."""
    pixels, table = arrays[PIXELS], arrays[TABLE]
    floats = np.empty((*pixels.shape[:-3], 3, *pixels.shape[-3:-1]), np.float32)
    for channel in range(3):
        floats[..., channel, :, :] = table[channel][pixels[..., channel]]
    return floats


def side_of(image: JsonObject, key: str, name: str, usual: int) -> int:
    """Return one side of an object such as `{"size": {"longest_edge": 1024}}`, or of a plain number."""
    if isinstance(image.get(key), int):
        return image.integer(key)
    return image.child(key).integer(name, usual)


def square_of(image: JsonObject, key: str, usual: int) -> Size:
    """Return (height, width) of an object or a plain number; a number is both."""
    if isinstance(image.get(key), int):
        return (image.integer(key),) * 2
    sides = image.child(key)
    return sides.integer("height", usual), sides.integer("width", usual)


def one_image(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return `pixel_values` [1, 3, H, W] of one image, or [n, 3, H, W] of n tiles."""
    values = channels_first(arrays)
    return {"pixel_values": values if values.ndim == 4 else values[None]}
