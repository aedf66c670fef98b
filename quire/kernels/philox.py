"""Counter-based random numbers: the n-th draw of a seed is a function of (seed, n) and of nothing else.

Philox4x32-10 of J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011): ten rounds of multiply, exchange and xor turn a 128-bit counter and a 64-bit key into 128 random bits.

Invariant: no state. A request therefore draws the same numbers alone, in any batch, after a preemption and on
any machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)  # for counter words 2 and 0
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)  # what each round adds to the two key words


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator itself: counter [4, N] and key [2, N], 32-bit words, -> random words [4, N]."""
    keys = (key[None] + _WEYL) & _LOW_32
    even, odd = counter[[2, 0]], counter[[1, 3]]
    for round_key in keys:
        product = even * _MULTIPLIERS
        # Each product's high half is mixed into an odd word; its low half becomes the other pair's odd word.
        mixed = (product >> _32) ^ odd ^ round_key
        even, odd = mixed[::-1], (product & _LOW_32)
    return np.stack((even[1], odd[0], even[0], odd[1]))


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), both [N]; a multiple of 2**-52."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack((seed & _LOW_32, seed >> _32))
    counter = np.zeros((4, len(seed)), dtype=np.uint64)
    counter[0], counter[1] = position & _LOW_32, position >> _32
    words = philox4x32(counter, key)
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    uniforms: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-52
    return uniforms
