# SPDX-License-Identifier: Apache-2.0
"""Memory traffic of recorded calls: weights, keys and values that they read, and states that they also write.

Invariant: activations are not counted, since they are in the caches; weights count without padding.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from quire.kernels.cpu import library
from quire.kernels.cpu.elementwise import ACTIVATIONS
from quire.kernels.formats import STREAM_CODES
from quire.kernels.formats.base import BLOCK
from quire.kernels.linear import GATED

_BITS = {0: 32, 1: 16, 2: 16, 3: 8, 4: 4, 5: 8, 10: 6} | dict.fromkeys(range(6, 10), 4)
"""Bits of a weight, by `enum Format` of csrc/cpu/panels.h."""
_INT8 = 3
_PRODUCTS = ("packed_linear", "rounded_linear")
_SIZES = slice(9, 15)
"""Arguments of these calls: outputs, inputs, halves, and the groups' description."""
_GATED = [ACTIVATIONS[activation] for activation in GATED]
_STREAM_BITS = {-1: 0} | {code: 8 * dtype.itemsize for dtype, code in STREAM_CODES.items()}
"""Bits of a group's scale or zero point, without the steps of blocks."""

DATA_DEPENDENT_OPS = frozenset({"experts"})
"""Ops whose traffic depends on a tensor computed by an earlier kernel."""


def num_bytes(name: str, arguments: bytes) -> int:
    """Return the bytes for a call's packed arguments; 0 for an op without such traffic."""
    count = _READERS.get(name)
    return 0 if count is None else count(library.unpacked(name, arguments))


def label(name: str, arguments: bytes) -> str:
    """Return the op, and for a matmul the weight: outputs x inputs."""
    if name not in _PRODUCTS:
        return name
    outputs, inputs, *_ = library.unpacked(name, arguments)[_SIZES]
    return f"{name} {outputs}x{inputs}"


def _of_linear(values: Sequence[int]) -> int:
    outputs, inputs, _, *groups = values[_SIZES]
    return _of_matrix(outputs, inputs, groups, values[-1])


def _of_rounded_linear(values: Sequence[int]) -> int:
    outputs, inputs, _, *groups = values[_SIZES]
    return _of_matrix(outputs, inputs, groups, _INT8)


def _of_matrix(outputs: int, inputs: int, groups: Sequence[int], weight_format: int) -> int:
    """Return the bytes of a weight; `groups` are values of k per group, and the types of scales and zeros."""
    size, *streams = groups
    numbers = outputs * inputs
    of_groups = outputs * -(-inputs // size) if size else outputs
    bits = numbers * _BITS[weight_format] + sum(of_groups * _STREAM_BITS[each] for each in streams)
    blocks = streams.count(STREAM_CODES[torch.int8])
    return (bits + 16 * blocks * outputs * -(-inputs // BLOCK)) // 8


def _of_experts(values: Sequence[int]) -> int:
    """Return the bytes of the chosen experts on this rank."""
    chosen, tokens, top_k, count, first, hidden, inner, activation = (
        values[i] for i in (2, 9, 10, 11, 12, 14, 15, 16)
    )
    (*up_groups, _, up_format), (*down_groups, _, down_format) = values[17:22], values[22:27]
    choices = {*(ctypes.c_int32 * (tokens * top_k)).from_address(chosen)}
    used = sum(first <= expert < first + count for expert in choices)
    halves = 2 if activation in _GATED else 1
    up = _of_matrix(halves * inner, hidden, up_groups, up_format)
    return used * (up + _of_matrix(hidden, inner, down_groups, down_format))


def _of_attention(values: Sequence[int]) -> int:
    lengths, requests, heads, head_size, cache_dtype = (values[i] for i in (5, 12, 18, 20, 27))
    present = sum((ctypes.c_int32 * requests).from_address(lengths))
    stored = head_size * _BITS[cache_dtype] // 8 + (4 if cache_dtype == 3 else 0)
    return 2 * present * heads * stored


def _of_heads(values: Sequence[int]) -> int:
    outputs, inputs, *groups, _, weight_format = values[-7:]
    return _of_matrix(outputs, inputs, groups, weight_format)


def _of_latents(values: Sequence[int]) -> int:
    lengths, requests, rank, rope, cache_dtype = (values[i] for i in (5, 8, 17, 18, 21))
    present = sum((ctypes.c_int32 * requests).from_address(lengths))
    return present * (rank + rope) * _BITS[cache_dtype] // 8


def _of_delta(values: Sequence[int]) -> int:
    requests, heads, keys, columns = (values[i] for i in (13, 19, 20, 21))
    return _of_states(requests, heads * keys * columns)


def _of_selective_scan(values: Sequence[int]) -> int:
    requests, channels, count = (values[i] for i in (14, 24, 25))
    return _of_states(requests, channels * count)


def _of_ssd_scan(values: Sequence[int]) -> int:
    requests, heads, size, count = (values[i] for i in (15, 25, 26, 28))
    return _of_states(requests, heads * size * count)


def _of_rwkv7(values: Sequence[int]) -> int:
    requests, heads, size = (values[i] for i in (14, 19, 20))
    return _of_states(requests, heads * size * size)


def _of_states(requests: int, numbers: int) -> int:
    return 2 * 4 * requests * numbers


_READERS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "packed_linear": _of_linear,
    "rounded_linear": _of_rounded_linear,
    "experts": _of_experts,
    "paged_attention": _of_attention,
    "per_head_linear": _of_heads,
    "latent_attention": _of_latents,
    "gated_delta": _of_delta,
    "rwkv7": _of_rwkv7,
    "selective_scan": _of_selective_scan,
    "ssd_scan": _of_ssd_scan,
}
