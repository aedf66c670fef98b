"""Codes of 4 bits in words (`formats.words`), multiplied in registers.

A program reads a step of its outputs' words, 16 bytes a lane, and takes the planes out of them one after the other: a
plane is a tile of 32 k with which the same k of the activations are multiplied. Integers with a scale per group are
multiplied as they are, exact in 16 bits, and sums of a group are scaled; what else codes stand for is rounded to the
activations' dtype. Weights are the rows of the product: so a product of few rows fills the tensor cores, too, and takes
them from registers.

Invariant: k is walked in order; how it is cut follows from the format.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.formats.words import PLANES, WORD_INPUTS, WORDS
from quire.kernels.triton.pairs import BFLOAT16_BASE, FLOAT16_BASE, nibbles_less, split_words

STEP = tl.constexpr(WORD_INPUTS)
_WORDS = tl.constexpr(WORDS)
_PLANES = tl.constexpr(PLANES)
BFLOAT16_BITS, FLOAT16_BITS = tl.constexpr(0x4300), tl.constexpr(0x6400)
"""Of the bases."""


@triton.jit
def nibble_at(data, output, k, inside, inputs):
    """The codes of outputs and k, int64 and of shapes that go together: int32."""
    within = k % STEP
    plane = (within // _WORDS).to(tl.int32)
    place = output * (tl.cdiv(inputs, STEP) * _WORDS) + k // STEP * _WORDS + within % _WORDS
    return tl.load(data + place, mask=inside, other=0) >> _shift_of(plane) & 15


@triton.jit
def _shift_of(plane):
    return plane // 2 * 4 + plane % 2 * 16


@triton.jit
def _integers(words, plane, zero, dtype: tl.constexpr):
    """The codes of a plane less a zero point, exact in any float dtype: in 16 bits they are made the last bits of
    numbers whose steps are 1, and nothing is converted."""
    code = words >> _shift_of(plane) & 15
    if dtype == tl.bfloat16:
        return (code | BFLOAT16_BITS).to(tl.int16).to(dtype, bitcast=True) - (zero + BFLOAT16_BASE).to(dtype)
    elif dtype == tl.float16:
        return (code | FLOAT16_BITS).to(tl.int16).to(dtype, bitcast=True) - (zero + FLOAT16_BASE).to(dtype)
    else:
        return (code - zero).to(dtype)


@triton.jit
def _floats(
    words,
    plane,
    scales,
    zeros,
    book,
    place,
    group_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """What the codes of a plane stand for, in float32."""
    code = words >> _shift_of(plane) & 15
    if GROUP < _WORDS:
        place = place[:, None] + (tl.arange(0, _WORDS) // GROUP * group_stride)[None, :]
    else:
        place = place[:, None]
    if KIND == "book":
        value = tl.load(book + code)
    elif ZEROS == 0:
        value = (code - 8).to(tl.float32)
    else:
        value = code.to(tl.float32)
    if ZEROS == 1:
        value -= tl.load(zeros + place).to(tl.float32)
    value *= tl.load(scales + place).to(tl.float32)
    if ZEROS == 2:
        value -= tl.load(zeros + place).to(tl.float32)
    return value


@triton.jit
def _of_groups(numbers, group_start, group_stride, step, GROUP: tl.constexpr):
    """Scales or zero points of the groups of a step, in their order; a group may be as long as several steps."""
    first = group_start + step * STEP // GROUP * group_stride
    loaded = (tl.load(numbers + first),)
    for group in tl.static_range(1, STEP // GROUP):
        # Triton unpacks no tuple into another, and each is of a type of its own.
        loaded = loaded + (tl.load(numbers + first + group * group_stride),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def _values(x_start, row_used, k, inputs, WHOLE: tl.constexpr):
    """Activations [M, k]; WHOLE: there are so many k."""
    used = row_used[:, None] if WHOLE else row_used[:, None] & (k < inputs)[None, :]
    return tl.load(x_start + k[None, :], mask=used, other=0.0)


@triton.jit
def nibble_tile(
    x_start, row_used, data, scales, zeros, book, output, group_start, group_stride, first_step, end_step, inputs,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of x times the weights of outputs [N], int64 and all in memory, of steps of k: float32 [M, N].

    The first group's scale of output n stands at group_start[n], and further ones behind it, `group_stride` apart.
    OWN: integers whose groups are of whole planes.
    """
    word = tl.arange(0, _WORDS)
    dtype: tl.constexpr = x_start.dtype.element_ty
    w_start = data + (output * (tl.cdiv(inputs, STEP) * _WORDS))[:, None] + word[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, end_step):
        words = tl.load(w_start + step * _WORDS)
        if OWN:
            # All of a step at once, and before they are wanted: one after the other, each would be waited for.
            step_scales = _of_groups(scales, group_start, group_stride, step, GROUP)
            step_zeros = _of_groups(zeros, group_start, group_stride, step, GROUP) if ZEROS else ()
            halves = split_words(words) if PAIRS else (words, words)
            for group in tl.static_range(STEP // GROUP):
                zero = tl.full([BLOCK_N, 1], 8, tl.int32)
                if ZEROS:
                    zero = step_zeros[group].to(tl.int32)[:, None]
                product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for plane in tl.static_range(group * GROUP // _WORDS, (group + 1) * GROUP // _WORDS):
                    values = _values(x_start, row_used, word + (step * STEP + plane * _WORDS), inputs, WHOLE)
                    if PAIRS:
                        weights = nibbles_less(halves[plane % 2], plane // 2, zero, dtype)
                    else:
                        weights = _integers(words, plane, zero, dtype)
                    product = tl.dot(weights, tl.trans(values), product, input_precision="ieee")
                sums += product * step_scales[group].to(tl.float32)[:, None]
        else:
            for plane in tl.static_range(_PLANES):
                values = _values(x_start, row_used, word + (step * STEP + plane * _WORDS), inputs, WHOLE)
                place = group_start + (step * STEP + plane * _WORDS) // GROUP * group_stride
                weights = _floats(words, plane, scales, zeros, book, place, group_stride, KIND, GROUP, ZEROS)
                sums = tl.dot(weights.to(dtype), tl.trans(values), sums, input_precision="ieee")
    return tl.trans(sums)
