# SPDX-License-Identifier: Apache-2.0
"""Unpacking of few-bit integers from larger ones, the first in the lowest bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def words_of(bits: int) -> tuple[int, int]:
    """Return the fewest integers of `bits` bits that fill whole 32-bit words, and the number of these words."""
    return (32, bits) if 32 % bits else (32 // bits, 1)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 or uint8 words into uint8: a word holds several integers, or several words hold a run of 32.

    Where a word is not a whole number of integers, as with 3 bits, they are one stream of bits, split into words.
    """
    width = words.element_size() * 8
    along = words.movedim(dim, -1)
    if width % bits == 0:
        shifts = torch.arange(0, width, bits, dtype=torch.int32, device=words.device)
        numbers = (along.unsqueeze(-1).int() >> shifts) & ((1 << bits) - 1)
    else:
        numbers = _stream(along, bits, width)
    return numbers.flatten(-2).to(torch.uint8).movedim(-1, dim)


def _stream(words: Tensor, bits: int, width: int) -> Tensor:
    """Unpack [..., W] into [..., W / bits, width]: each integer begins in one word and may end in the next."""
    whole = F.pad(words, (0, -words.shape[-1] % bits))
    runs = torch.unflatten(whole, -1, (-1, bits)).long() & ((1 << width) - 1)
    first = torch.arange(width, device=words.device) * bits
    word, shift = first // width, first % width
    following = torch.cat([runs, torch.zeros_like(runs[..., :1])], -1)[..., word + 1]
    pairs = runs[..., word] | following << width
    return (pairs >> shift) & ((1 << bits) - 1)
