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
_BELOW_ONE = np.float32(1.0 - 2.0**-24)


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
    words = _words(seeds, positions, np.zeros(len(seeds), dtype=np.uint64))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    uniforms: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-52
    return uniforms


def fractions(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Numbers in (0, 1) for `count` tokens of one (seed, position), precise near 0: 64 bits each as a float32.

    Tokens 2 i and 2 i + 1 have the words of counter (position, i).
    """
    pairs = np.arange((count + 1) // 2, dtype=np.uint64)
    seeds, positions = (np.full(len(pairs), value, dtype=np.int64) for value in (seed, position))
    high, low = _words(seeds, positions, pairs).reshape(2, 2, -1).transpose(1, 2, 0).astype(np.float32)
    v = high * np.float32(2.0**-32) + (low + np.float32(0.5)) * np.float32(2.0**-64)
    return np.minimum(v, _BELOW_ONE).reshape(-1)[:count]


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Noise -ln(-ln(1 - v)) for `count` tokens of one (seed, position), with v of `fractions`."""
    noise: NDArray[np.float64] = -np.log(-np.log1p(-fractions(seed, position, count).astype(np.float64)))
    return noise


def _words(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], thirds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Random words [4, N] of the counters (position, third, 0)."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack((seed & _LOW_32, seed >> _32))
    return philox4x32(np.stack((position & _LOW_32, position >> _32, thirds, thirds * np.uint64(0))), key)
