"""Checks and layouts that the wrappers of several kernels share.

Invariant: no address reaches C++ before the tensor behind it was checked, and the tensor outlives the call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu.library import CACHE_DTYPE_CODES, DTYPE_CODES


def say(tensor: Tensor) -> str:
    """A tensor's dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_on_cpu(op: str, name: str, tensor: Tensor) -> None:
    """Of any dtype."""
    if not tensor.is_cpu:
        raise ValueError(f"{op}: {name} must be on the CPU, but is on {tensor.device}")


def dtype_code(op: str, name: str, tensor: Tensor) -> int:
    """The code of a tensor's dtype; it must be on the CPU."""
    check_on_cpu(op, name, tensor)
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, but is {tensor.dtype}")
    return code


def check_index(op: str, name: str, index: Tensor, size: int) -> None:
    """int64 [size]."""
    check_array(op, name, index, torch.int64, (size,))


def check_array(op: str, name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Contiguous, of this dtype and shape, and on the CPU."""
    good = array.dtype is dtype and array.shape == shape and array.is_contiguous() and array.is_cpu
    if not good:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{op}: {name} must be contiguous {kind} {list(shape)} on the CPU; it is {say(array)}"
        )


class Heads(NamedTuple):
    """Layout of [tokens, heads, size]."""

    tokens: int
    heads: int
    token_stride: int
    head_stride: int
    size: int


def check_heads(op: str, name: str, heads: Tensor, dtype: torch.dtype) -> Heads:
    """[tokens, heads, size] of this dtype; any strides but in the last dimension."""
    if heads.dim() != 3 or heads.dtype is not dtype or not heads.is_cpu:
        raise ValueError(f"{op}: {name} must be {dtype} [tokens, heads, size] on the CPU; it is {say(heads)}")
    tokens, count, size = heads.shape
    token_stride, head_stride, stride = heads.stride()
    if stride != 1:
        raise ValueError(f"{op}: {name} must have stride 1 in its last dimension; it has {heads.stride()}")
    return Heads(tokens, count, token_stride, head_stride, size)


class Cache(NamedTuple):
    """Layout of a KV cache."""

    blocks: int
    block_size: int
    code: int


def check_cache(op: str, k_cache: Tensor, v_cache: Tensor, heads: int, size: int) -> Cache:
    """The layout of a cache for this many key-value heads of this size."""
    dtype = k_cache.dtype
    code = CACHE_DTYPE_CODES.get(dtype)
    stored = size + 4 if dtype is torch.int8 else size
    if code is None or v_cache.dtype is not dtype:
        raise TypeError(f"{op}: the caches are {dtype} and {v_cache.dtype}; both must be float or int8")
    shape = k_cache.shape
    good = len(shape) == 4 and shape[1] == heads and shape[2] == stored and shape[3] > 0
    if not good or v_cache.shape != (shape[0], heads, shape[3], stored):
        raise ValueError(
            f"{op}: caches for {heads} heads of {size} must be {dtype} [blocks, {heads}, {stored}, block size] and "
            f"[blocks, {heads}, block size, {stored}]; they are {say(k_cache)} and {say(v_cache)}"
        )
    if dtype is torch.int8 and size % 4:
        raise ValueError(f"{op}: int8 caches hold float32 scales: a head of {size} must be in fours")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.is_cpu and v_cache.is_cpu):
        raise ValueError(f"{op}: the caches must be contiguous and on the CPU")
    return Cache(shape[0], shape[3], code)
