"""Gumbel noise for every token of a row, made where it is used.

A Gumbel number is -ln(E), with E exponential, and E is -ln(1 - v), with v uniform. The tokens that can win have large
noise, so small v, which is why v is what is precise: 64 random bits make a float32 of full precision down to 2**-65. A
token with 2**-64 of the mass still has its chance, where 24 bits would end at 2**-24.

Random bits: Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). One call of
counter (position, pair) serves the two tokens of a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def fraction_of(high, low):
    """64 bits as a float32 in (0, 1): neither end, so that all that follows is finite."""
    fraction = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-64
    return tl.minimum(fraction, BELOW_ONE)


@triton.jit
def _words(seed, position, pair):
    """The random bits of pairs of tokens: two words for each of the two."""
    pair = pair.to(tl.uint32)
    zero = pair * 0
    low, high = (
        (position.to(tl.uint64) & 0xFFFFFFFF).to(tl.uint32),
        (position.to(tl.uint64) >> 32).to(tl.uint32),
    )
    return tl.philox(seed, zero + low, zero + high, pair, zero)


@triton.jit
def fractions(seed, position, first, TILE: tl.constexpr):
    """v of the tokens from `first`, an even number, on: [TILE] float32. See `philox.fractions`."""
    a, b, c, d = _words(seed, position, first // 2 + tl.arange(0, TILE // 2))
    return tl.interleave(fraction_of(a, b), fraction_of(c, d))


@triton.jit
def fractions_at(seed, position, token):
    """v of any tokens, as `fractions` has them."""
    a, b, c, d = _words(seed, position, token // 2)
    return tl.where(token % 2 == 0, fraction_of(a, b), fraction_of(c, d))


@triton.jit
def gumbel_of(v):
    """-ln(-ln(1 - v))."""
    # Near 0 the logarithm of 1 - v would lose what v has; the series has an error of v**5 / 5 there.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def gumbel(seed, position, first, TILE: tl.constexpr):
    """Noise of the tokens from `first`, an even number, on: [TILE] float32 between -2.9 and 45.1."""
    return gumbel_of(fractions(seed, position, first, TILE))


@triton.jit
def gumbel_at(seed, position, token):
    """Noise of any tokens."""
    return gumbel_of(fractions_at(seed, position, token))
