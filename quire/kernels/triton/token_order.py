# SPDX-License-Identifier: Apache-2.0
"""Order of tokens inside kernels: see `quire.kernels.reference_sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_LOGIT = tl.constexpr(3.4028234663852886e38)
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def ordered_bits(value):
    """Return a float's bits as an int32 with the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0.0 and 0.0 equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_keys(value, column, n):
    """Return the order of tokens as one number: the higher logit first and, of equal ones, the lower id."""
    key = (ordered_bits(value).to(tl.int64) << 32) + (n - 1 - column)
    return tl.where(column < n, key, NO_KEY)


@triton.jit
def id_of(key, n):
    """Return the token of a key."""
    return n - 1 - (key & 0xFFFFFFFF)
