"""Integers of a few bits out of larger ones, the first in the lowest bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def words_of(bits: int) -> tuple[int, int]:
    """The fewest integers of so many bits that are a whole number of words of 32 bits, and this number."""
    return (32, bits) if 32 % bits else (32 // bits, 1)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 or uint8 words of which each holds several integers, or a run of 32 several words -> uint8.

    Where a word is no whole number of integers, as with 3 bits, they are one stream of bits, cut into words.
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
    """[..., W] -> [..., W / bits, width]: each integer begins in one word and may end in the next."""
    whole = F.pad(words, (0, -words.shape[-1] % bits))
    runs = torch.unflatten(whole, -1, (-1, bits)).long() & ((1 << width) - 1)
    first = torch.arange(width, device=words.device) * bits
    word, shift = first // width, first % width
    following = torch.cat([runs, torch.zeros_like(runs[..., :1])], -1)[..., word + 1]
    pairs = runs[..., word] | following << width
    return (pairs >> shift) & ((1 << bits) - 1)
