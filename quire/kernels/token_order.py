"""The one order of tokens: the higher logit first and, of equal logits, the lower id first.

Invariant: argmax, top-k, top-p, ranks and logprobs all mean this order, which is total; a result never
depends on how a selection algorithm treats ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def order_keys(logits: Tensor) -> Tensor:
    """Integers in the order of tokens: logits [N, V] float32 without NaN -> [N, V] int64, larger is earlier.

    The upper half is the logit's bit pattern made monotonic (negative numbers have their magnitude bits
    flipped), the lower half counts ids downwards.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 equal
    monotonic = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (monotonic.long() << 32) + torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)


def ids_of(keys: Tensor, vocab_size: int) -> Tensor:
    """The token ids of some order keys, of the same shape."""
    return vocab_size - 1 - (keys & _LOW_32)


def rank_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """1-based rank of one token per row: order keys [N, V], token_ids [N] -> [N] int64."""
    return (keys > keys.gather(1, token_ids[:, None])).sum(1) + 1
