# SPDX-License-Identifier: Apache-2.0
"""4-bit codes in the layout of GPUs: 32-bit words, eight codes of an output in each.

A step of 256 k of an output is 32 adjacent words, one cache line; 16 bytes of them are 32 codes. The k of a step are
eight consecutive planes of 32, and a word has one code of each. So one shift of 32 neighbouring words yields the codes
of 32 neighbouring k, and no lane needs another lane's words. Plane p starts at bit 4 * (p // 2) + 16 * (p % 2): two
planes align with the 16-bit halves of a word.
"""

import torch
from torch import Tensor

WORDS = 32
"""Words in a step, and values of k in a plane."""
PLANES = 8
WORD_INPUTS = PLANES * WORDS
"""Values of k in a step."""
_PLANES_OF_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Planes in the low and in the high half of each byte of a word."""


def to_words(codes: Tensor) -> Tensor:
    """Pack uint8 [N, K], K a multiple of `WORD_INPUTS`, into int32 [N, K / 8]."""
    planes = torch.unflatten(codes, 1, (-1, PLANES, WORDS))
    packed = [planes[:, :, low] | planes[:, :, high] << 4 for low, high in _PLANES_OF_BYTES]
    return torch.stack(packed, -1).view(torch.int32).flatten(1)


def from_words(words: Tensor) -> Tensor:
    """Invert `to_words`."""
    packed = torch.unflatten(words.view(torch.uint8), 1, (-1, WORDS, 4))
    planes = [packed[..., 0]] * PLANES
    for byte, (low, high) in enumerate(_PLANES_OF_BYTES):
        planes[low], planes[high] = packed[..., byte] & 15, packed[..., byte] >> 4
    return torch.stack(planes, 2).flatten(1)
