"""Codes of 4 and of 8 bits as the floats that they stand for, and which formats are multiplied in another way.

Invariant: a number comes out in float32 as what the packed one stands for, and is rounded once, by whoever asks.
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
from quire.kernels.linear import PackedWeight
from quire.kernels.triton.launch import in_pairs
from quire.kernels.triton.nibbles import STEP, nibble_at

_LEAST_GROUP = 32
"""Of int4: what one product adds up is scaled as a whole."""


@triton.jit
def weights_at(
    data, scales, zeros, book, output, k, inside, outputs, inputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The weights of outputs and k, int64 and of shapes that go together; 0 where they are not inside.

    GROUP is 0 where a row has one scale; ZEROS is 1 with zero points, 2 with minimums.
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
    """Rows of x times the outputs' weights of 8 bits, rounded to x's dtype, of k from begin to end: float32 [M, N]."""
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
    """Whether a matrix is of codes of 4 bits."""
    return weight.data.dtype is torch.int32


def code_options(weight: PackedWeight) -> dict[str, Any]:
    """What a kernel that calls `weights_at` is compiled for."""
    kept, zeros = format_of(weight.scheme), weight.zeros
    return {
        "KIND": "book" if isinstance(kept, BookFormat) else weight.scheme.kind,
        "GROUP": kept.group_in_rows(weight.scheme),
        "ZEROS": 0 if zeros is None else 1 if zeros.dtype is torch.uint8 else 2,
    }


def has_own_product(weight: PackedWeight) -> bool:
    """Whether a format is multiplied in a way of its own, and not as what its codes stand for."""
    options = code_options(weight)
    kind, group, zeros = options["KIND"], options["GROUP"], options["ZEROS"]
    own = {
        "float": True,
        "int8": not group and not zeros,
        "fp8": not group and weight.scheme.fast,
        "int4": group >= _LEAST_GROUP and zeros < 2,
    }
    return own.get(kind, False)


def product_options(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel that multiplies rows in a dtype with such a weight is compiled for."""
    return code_options(weight) | {
        "OWN": has_own_product(weight),
        "PAIRS": in_pairs(dtype),
        "WHOLE": weight.inputs % STEP.value == 0,
    }


def book_of(weight: PackedWeight) -> Tensor | None:
    """The numbers that codes stand for, where they are in a table, on the weight's device."""
    kept = format_of(weight.scheme)
    return _on_device(kept, weight.data.device) if isinstance(kept, BookFormat) else None


@cache
def _on_device(of: BookFormat, device: torch.device) -> Tensor:
    return of.book.to(device)
