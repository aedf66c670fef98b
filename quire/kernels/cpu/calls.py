# SPDX-License-Identifier: Apache-2.0
"""Calls of the C++ kernels, recording of calls, and checks and layouts that several wrappers share.

Invariant: no address reaches C++ before the tensor behind it was checked and found aligned to its elements, and the
tensor outlives the call. Outputs are allocated here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from struct import error as StructError
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.kernels.cpu.arena import Arena, ArenaFullError
from quire.kernels.cpu.library import CACHE_DTYPE_CODES, DTYPE_CODES
from quire.kernels.cpu.signatures import SIGNATURES


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_on_cpu(op: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor of any dtype is on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{op}: {name} must be on the CPU, but is on {tensor.device}")


def dtype_code(op: str, name: str, tensor: Tensor) -> int:
    """Return the code of a tensor's dtype; it must be on the CPU."""
    check_on_cpu(op, name, tensor)
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, but is {tensor.dtype}")
    return code


def check_index(op: str, name: str, index: Tensor, size: int) -> None:
    """Check that `index` is int64 [size]."""
    check_array(op, name, index, torch.int64, (size,))


def check_array(op: str, name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check that an array is contiguous, of this dtype and shape, and on the CPU."""
    good = array.dtype is dtype and array.shape == shape and array.is_contiguous() and array.is_cpu
    if not good:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{op}: {name} must be contiguous {kind} {list(shape)} on the CPU; it is {describe(array)}"
        )


class HeadLayout(NamedTuple):
    """Layout of [tokens, heads, size]."""

    tokens: int
    heads: int
    token_stride: int
    head_stride: int
    size: int


def check_heads(op: str, name: str, heads: Tensor, dtype: torch.dtype) -> HeadLayout:
    """Return the layout of [tokens, heads, size] of this dtype; any strides except in the last dimension."""
    if heads.dim() != 3 or heads.dtype is not dtype or not heads.is_cpu:
        raise ValueError(
            f"{op}: {name} must be {dtype} [tokens, heads, size] on the CPU; it is {describe(heads)}"
        )
    tokens, count, size = heads.shape
    token_stride, head_stride, stride = heads.stride()
    if stride != 1:
        raise ValueError(f"{op}: {name} must have stride 1 in its last dimension; it has {heads.stride()}")
    return HeadLayout(tokens, count, token_stride, head_stride, size)


class CacheLayout(NamedTuple):
    """Layout of a KV cache."""

    blocks: int
    block_size: int
    code: int


def check_cache(op: str, k_cache: Tensor, v_cache: Tensor, heads: int, size: int) -> CacheLayout:
    """Return the layout of a cache for this many key-value heads of this size."""
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
            f"[blocks, {heads}, block size, {stored}]; they are {describe(k_cache)} and {describe(v_cache)}"
        )
    if dtype is torch.int8 and size % 4:
        raise ValueError(f"{op}: int8 caches hold float32 scales: a head of {size} must be in fours")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.is_cpu and v_cache.is_cpu):
        raise ValueError(f"{op}: the caches must be contiguous and on the CPU")
    return CacheLayout(shape[0], shape[3], code)


RecordedCall = tuple[int, bytes]
"""Address and packed arguments of a kernel call."""


class _Recording(threading.local):
    """Recorder of this thread's kernel calls."""

    listener: Callable[[RecordedCall], None] | None = None
    dry: Callable[[int], Tensor] | None = None
    """Set to record kernels without running them; returns their scratch memory of that many float32."""

    @contextmanager
    def into(
        self, listener: Callable[[RecordedCall], None], *, dry: Callable[[int], Tensor] | None = None
    ) -> Iterator[None]:
        """Notify `listener` after each call, or with `dry` instead of running it."""
        assert self.listener is None, "one recording at a time"
        self.listener, self.dry = listener, dry
        try:
            yield
        finally:
            self.listener = self.dry = None


recording = _Recording()

NOTHING = torch.empty(0)
"""Placeholder for an absent tensor: its address is 0."""

_NO_MEMORY, _MISALIGNED = -2, -3
_WIDEST = 8
"""Bytes of the largest elements: what is aligned to them is aligned to any element."""
_address = Tensor.data_ptr


def call(name: str, tensors: tuple[Tensor, ...], *numbers: float) -> int:
    """Run a kernel on checked tensors and numbers; return its status, 0 unless it refuses some input.

    Raises:
        ValueError: a tensor is not aligned to its elements, or a number does not fit into 64 bits.
        MemoryError: scratch memory cannot be allocated.
        RuntimeError: the library does not accept a code that it was given.
    """
    loaded = library.loaded()
    assert loaded is not None, "the table of ops asks supports() before it loads a kernel"
    function, pack, address = loaded.kernels[name]
    try:
        packed = pack(_WIDEST, *map(_address, tensors), *numbers)
    except StructError as cause:
        raise ValueError(f"{name}: a size does not fit into 64 bits: {numbers}") from cause
    if recording.dry is not None:
        assert recording.listener is not None, "dry calls need a recorder"
        if any(tensor.data_ptr() % _WIDEST for tensor in tensors):
            packed = pack(1, *map(_address, tensors), *numbers)
        recording.listener((address, packed))
        return 0
    status = function(packed)
    if status == _MISALIGNED:
        check_alignment(name, tensors)
        packed = pack(1, *map(_address, tensors), *numbers)
        status = function(packed)
    if status >= 0:
        if recording.listener is not None:
            recording.listener((address, packed))
        return status
    if status == _NO_MEMORY:
        raise MemoryError(f"{name}: no memory for the kernel's scratch space")
    raise RuntimeError(f"{name}: the kernel library refuses the call ({status}): reinstall quire")


def check_alignment(name: str, tensors: tuple[Tensor, ...]) -> None:
    """Check the alignment of each tensor by itself, after the common check failed.

    Raises:
        ValueError: one is not aligned to its elements.
    """
    for tensor, label in zip(tensors, SIGNATURES[name][0].split(), strict=True):
        needed = (
            4 if tensor.dtype is torch.int8 else tensor.itemsize
        )  # an int8 cache holds float32 scales, too
        if tensor.data_ptr() % needed:
            raise ValueError(
                f"{name}: {label}, {tensor.dtype} {list(tensor.shape)}, must begin at a multiple of {needed} bytes; "
                f"it is {tensor.data_ptr() % needed} past one"
            )


def _poisoned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory filled with NaN, or for integers with a number that is no token, row or weight."""
    out = like.new_empty(shape, dtype=dtype)
    if out.is_floating_point() or out.dtype is torch.bool:
        return out.fill_(torch.nan)
    limits = torch.iinfo(out.dtype)
    return out.fill_(limits.min or limits.max)


LARGE = 1 << 20
"""Bytes from which on an output is worth the microseconds of an arena allocation in Python."""


class _Lending(threading.local):
    """Arena for outputs of this thread's kernels."""

    arena: Arena | None = None

    @contextmanager
    def of(self, arena: Arena | None) -> Iterator[None]:
        """Place large outputs in the arena in this context, while it has space.

        Fresh memory costs a page fault per 4 KiB, and the C library returns large allocations as soon as they are
        freed, which took up to a sixth of a long prompt's time.
        """
        before, self.arena = self.arena, arena
        try:
            yield
        finally:
            self.arena = before


lending = _Lending()


def _placed(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory of the arena, unless a dispatch mode must see torch's allocations."""
    arena, dtype = lending.arena, dtype or like.dtype
    if arena is None or prod(shape) * dtype.itemsize < LARGE or _get_current_dispatch_mode() is not None:
        return like.new_empty(shape, dtype=dtype)
    try:
        return arena.empty(shape, dtype)
    except ArenaFullError:  # fall back to the system's memory
        return like.new_empty(shape, dtype=dtype)


def _empty() -> Callable[..., Tensor]:
    value = os.environ.get("QUIRE_DEBUG_KERNELS", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"QUIRE_DEBUG_KERNELS is {value!r}; it must be '0' or '1'")
    return _poisoned if value == "1" else _placed


empty = _empty()
"""`empty(like, *shape, dtype=None)`: short-lived memory of an output. With QUIRE_DEBUG_KERNELS=1 it is first filled
with values that are no result, so that elements which a kernel does not write are visible.
"""
