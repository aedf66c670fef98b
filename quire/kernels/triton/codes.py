# SPDX-License-Identifier: Apache-2.0
"""Decoding of 4-bit and 8-bit codes to floats, formats with their own matmul, and dequantization of whole weights.

4-bit codes in words (`formats.grouped`) are multiplied in registers. A program reads a step of its outputs' words, 16
bytes a lane, and extracts the planes one by one: a plane is a tile of 32 k, multiplied with the same k of the
activations. Integers with a scale per group are multiplied as they are, exact in 16 bits, and sums of a group are
scaled; other codes are decoded and rounded to the activations' dtype. Weights are the rows of the matmul, so that few
activation rows also fill the tensor cores, which read weights from registers.

Invariant: decoding to float32 is exact, and the caller rounds once. k is processed in order; its tiling follows from
the format.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats import format_of
from quire.kernels.formats.books import BookFormat
from quire.kernels.formats.grouped import PLANES, WORD_INPUTS, WORDS
from quire.kernels.linear import PackedWeight
from quire.kernels.triton.launch import in_pairs
from quire.kernels.triton.primitives import BFLOAT16_BASE, FLOAT16_BASE, nibbles_less, split_words

STEP = tl.constexpr(WORD_INPUTS)
_WORDS = tl.constexpr(WORDS)
_PLANES = tl.constexpr(PLANES)
BFLOAT16_BITS, FLOAT16_BITS = tl.constexpr(0x4300), tl.constexpr(0x6400)
"""Bits of the base floats."""


@triton.jit
def nibble_at(data, output, k, inside, inputs):
    """Return the codes of outputs and k, int64 and broadcastable: int32."""
    within = k % STEP
    plane = (within // _WORDS).to(tl.int32)
    place = output * (tl.cdiv(inputs, STEP) * _WORDS) + k // STEP * _WORDS + within % _WORDS
    return tl.load(data + place, mask=inside, other=0) >> _shift_of(plane) & 15


@triton.jit
def _shift_of(plane):
    return plane // 2 * 4 + plane % 2 * 16


@triton.jit
def _integers(words, plane, zero, dtype: tl.constexpr):
    """Return a plane's codes minus a zero point, exact in any float dtype.

    In 16 bits they become the last bits of numbers whose steps are 1, without a conversion.
    """
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
    """Return the decoded values of a plane, in float32."""
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
    """Return scales or zero points of the groups of a step, in order; a group may span several steps."""
    first = group_start + step * STEP // GROUP * group_stride
    loaded = (tl.load(numbers + first),)
    for group in tl.static_range(1, STEP // GROUP):
        # Triton unpacks no tuple into another, and each is of a type of its own.
        loaded = loaded + (tl.load(numbers + first + group * group_stride),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def _values(x_start, row_used, k, inputs, WHOLE: tl.constexpr):
    """Return activations [M, k]; WHOLE: all k exist."""
    used = row_used[:, None] if WHOLE else row_used[:, None] & (k < inputs)[None, :]
    return tl.load(x_start + k[None, :], mask=used, other=0.0)


@triton.jit
def nibble_tile(
    x_start, row_used, data, scales, zeros, book, output, group_start, group_stride, first_step, end_step, inputs,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x with the weights of outputs [N], int64 and in range, for steps of k: float32 [M, N].

    The first group's scale of output n is at group_start[n], and further ones `group_stride` apart. OWN: integers with
    groups of whole planes.
    """
    word = tl.arange(0, _WORDS)
    dtype: tl.constexpr = x_start.dtype.element_ty
    w_start = data + (output * (tl.cdiv(inputs, STEP) * _WORDS))[:, None] + word[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, end_step):
        words = tl.load(w_start + step * _WORDS)
        if OWN:
            # Load a step's scales together and early: one by one, each would stall.
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


_LEAST_GROUP = 32
"""Least group size of int4: the sums of one dot product are scaled together."""


@triton.jit
def weights_at(
    data, scales, zeros, book, output, k, inside, outputs, inputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Return the weights of outputs and k, int64 and broadcastable; 0 where not `inside`.

    GROUP is 0 if a row has one scale; ZEROS is 1 with zero points, 2 with minimums.
    """
    if KIND == "int4" or KIND == "book":
        place = k // GROUP * outputs + output
        code = nibble_at(data, output, k, inside, inputs)
        if KIND == "book":
            value = tl.load(book + code, mask=inside, other=0.0)
        else:
            value = code.to(tl.float32)
            if ZEROS == 0:
                value -= 8.0
    else:
        place = output + k * 0
        if GROUP:
            place = output * tl.cdiv(inputs, GROUP) + k // GROUP
        value = tl.load(data + output * inputs + k, mask=inside, other=0.0).to(tl.float32)
        if ZEROS == 1:
            value += 128.0
    if ZEROS == 1:
        value -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
    value *= tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    if ZEROS == 2:
        value -= tl.load(zeros + place, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def code_tile(
    x_start, row_used, data, scales, zeros, output, output_used, begin, end, inputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x with 8-bit weights, rounded to x's dtype, for k from begin to end: float32 [M, N]."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < end)[None, :], other=0.0)
        inside = output_used[None, :] & (k < end)[:, None]
        weights = weights_at(
            data,
            scales,
            zeros,
            None,
            output[None, :],
            k.to(tl.int64)[:, None],
            inside,
            0,
            inputs,
            KIND,
            GROUP,
            ZEROS,
        )
        sums = tl.dot(values, weights.to(values.dtype), sums, input_precision="ieee")
    return sums


def in_words(weight: PackedWeight) -> bool:
    """Return whether a weight has 4-bit codes."""
    return weight.data.dtype is torch.int32


def code_options(weight: PackedWeight) -> dict[str, Any]:
    """Return the compile-time options of a kernel that calls `weights_at`."""
    kept, zeros = format_of(weight.scheme), weight.zeros
    return {
        "KIND": "book" if isinstance(kept, BookFormat) else weight.scheme.kind,
        "GROUP": kept.group_in_rows(weight.scheme),
        "ZEROS": 0 if zeros is None else 1 if zeros.dtype is torch.uint8 else 2,
    }


def has_own_matmul(weight: PackedWeight) -> bool:
    """Return whether a format has its own matmul, instead of decoding its codes."""
    options = code_options(weight)
    kind, group, zeros = options["KIND"], options["GROUP"], options["ZEROS"]
    own = {
        "float": True,
        "int8": not group and not zeros,
        "fp8": not group and weight.scheme.fast,
        "int4": group >= _LEAST_GROUP and zeros < 2,
    }
    return own.get(kind, False)


def matmul_options(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time options of a kernel that multiplies rows of a dtype with such a weight."""
    return code_options(weight) | {
        "OWN": has_own_matmul(weight),
        "PAIRS": in_pairs(dtype),
        "WHOLE": weight.inputs % STEP.value == 0,
    }


def book_of(weight: PackedWeight) -> Tensor | None:
    """Return the codebook on the weight's device, if the format has one."""
    kept = format_of(weight.scheme)
    return _on_device(kept, weight.data.device) if isinstance(kept, BookFormat) else None


@cache
def _on_device(of: BookFormat, device: torch.device) -> Tensor:
    return of.book.to(device)


TILE = 1024


@triton.jit
def _widen(
    out, ids, data, scales, zeros, book, num_rows, n,
    HAS_IDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = index
    if HAS_IDS:
        row = tl.load(ids + index)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tl.where((row >= 0) & (row < num_rows), k < n, False)
    value = weights_at(data, scales, zeros, book, row, k, inside, num_rows, n, KIND, GROUP, ZEROS)
    tl.store(out + index * n + k, value.to(out.dtype.element_ty), mask=k < n)


def widened(weight: PackedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return the dequantized weight [N, K], of codes in rows, or its rows ids [T]: [T, K].

    An id outside the weight reads as 0.
    """
    options = code_options(weight)
    count = weight.outputs if ids is None else len(ids)
    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.data.device)
    if out.numel():
        _widen[(count, triton.cdiv(weight.inputs, TILE))](
            out, ids, weight.data, weight.scales, weight.zeros, book_of(weight), weight.outputs, weight.inputs,
            HAS_IDS=ids is not None, **options, TILE=TILE,
        )  # fmt: skip
    return out
