# SPDX-License-Identifier: Apache-2.0
"""Rows that the image encoder of a vision encoder-decoder checkpoint gives to cross-attention.

Invariant: torch-free; every image of a checkpoint has one size, and so one number of rows.
"""

from __future__ import annotations

import math
from typing import Any

from quire.models.json_object import JsonObject

SWIN = "donut-swin"
FIRST_TOKENS = {"vit": 1, "deit": 2}
"""Vision transformers -> tokens before their patches."""
KINDS = (*FIRST_TOKENS, SWIN)


def image_size(encoder: JsonObject) -> tuple[int, int]:
    """Return (height, width) of the encoder's images.

    Raises:
        ModelLoadError: the value is malformed.
    """
    return _pair(encoder, "image_size", 224)


def patch_size(encoder: JsonObject) -> tuple[int, int]:
    """Return (height, width) of a patch. Raises as `image_size`."""
    return _pair(encoder, "patch_size", 4 if encoder.get("model_type") == SWIN else 16)


def grids(encoder: JsonObject) -> list[tuple[int, int]]:
    """Return rows and columns of patches, of each stage in an encoder of several. Raises as `image_size`."""
    sides = [
        math.ceil(side / patch) for side, patch in zip(image_size(encoder), patch_size(encoder), strict=True)
    ]
    found = [(sides[0], sides[1])]
    if encoder.get("model_type") == SWIN:
        for _ in encoder.numbers("depths")[1:]:
            found.append((-(-found[-1][0] // 2), -(-found[-1][1] // 2)))
    return found


def num_rows(encoder: JsonObject) -> int:
    """Return the rows of the encoder's output.

    Raises:
        ModelLoadError: a size is malformed.
        UnsupportedModelError: it is no encoder of `KINDS`.
    """
    kind = encoder.text("model_type")
    if kind not in KINDS:
        raise encoder.unsupported("model_type", f"one of {', '.join(KINDS)}")
    rows, columns = grids(encoder)[-1]
    return rows * columns + FIRST_TOKENS.get(kind, 0)


def _pair(encoder: JsonObject, key: str, usual: int) -> tuple[int, int]:
    value: Any = encoder.get(key)
    pair = [usual if value is None else value] * 2 if not isinstance(value, list) else value
    if len(pair) != 2 or not all(type(side) is int and 0 < side <= 2**16 for side in pair):
        raise encoder.wrong(key, "an integer in [1, 65536], or a list of two: height and width")
    return pair[0], pair[1]
