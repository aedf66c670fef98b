"""Calling the C++ kernels, and telling whoever records a tape of each call.

Invariant: a kernel gets the address of a tensor that is aligned to its elements, and memory for its results that is
ours.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from struct import error as StructError

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.kernels.cpu.arena import Arena, ArenaFullError

RecordedCall = tuple[int, bytes]
"""Address and packed arguments of a kernel call."""


class _Recording(threading.local):
    """Who hears of this thread's kernel calls."""

    listener: Callable[[RecordedCall], None] | None = None
    dry: Callable[[int], Tensor] | None = None
    """Kernels are told of only, none runs; gives what they would have as scratch memory, so many float32."""

    @contextmanager
    def into(
        self, listener: Callable[[RecordedCall], None], *, dry: Callable[[int], Tensor] | None = None
    ) -> Iterator[None]:
        """Tell `listener` of each call, once it is done, or with `dry` instead of it."""
        assert self.listener is None, "one recording at a time"
        self.listener, self.dry = listener, dry
        try:
            yield
        finally:
            self.listener = self.dry = None


recording = _Recording()

NOTHING = torch.empty(0)
"""Stands for a tensor that is not there: its address is 0."""

_NO_MEMORY, _MISALIGNED = -2, -3
_WIDEST = 8
"""Bytes of the largest elements: whatever is aligned to them is aligned to its own."""
_address = Tensor.data_ptr


def call(name: str, tensors: tuple[Tensor, ...], *numbers: float) -> int:
    """Run a kernel on tensors, which were checked, and numbers; returns its status, 0 unless it refuses some input.

    Raises:
        ValueError: a tensor is not aligned to its elements, or a number does not fit into 64 bits.
        MemoryError: there is none for scratch space.
        RuntimeError: the library does not know a code that it was given.
    """
    loaded = library.loaded()
    assert loaded is not None, "the table of ops asks supports() before it loads a kernel"
    function, pack, address = loaded.kernels[name]
    try:
        packed = pack(_WIDEST, *map(_address, tensors), *numbers)
    except StructError as cause:
        raise ValueError(f"{name}: a size does not fit into 64 bits: {numbers}") from cause
    if recording.dry is not None:
        assert recording.listener is not None, "somebody hears of it"
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
    """Each by itself: what not all are aligned to may still be more than some need.

    Raises:
        ValueError: one is not aligned to its elements.
    """
    for tensor, label in zip(tensors, library.SIGNATURES[name][0].split(), strict=True):
        needed = (
            4 if tensor.dtype is torch.int8 else tensor.itemsize
        )  # an int8 cache holds float32 scales, too
        if tensor.data_ptr() % needed:
            raise ValueError(
                f"{name}: {label}, {tensor.dtype} {list(tensor.shape)}, must begin at a multiple of {needed} bytes; "
                f"it is {tensor.data_ptr() % needed} past one"
            )


def _poisoned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """NaN, or for integers a number that is no token, row or weight."""
    out = like.new_empty(shape, dtype=dtype)
    if out.is_floating_point() or out.dtype is torch.bool:
        return out.fill_(torch.nan)
    limits = torch.iinfo(out.dtype)
    return out.fill_(limits.min or limits.max)


LARGE = 1 << 20
"""Bytes of an output from which on its place is worth the microseconds that Python takes to find it."""


class _Lending(threading.local):
    """Where outputs of this thread's kernels lie."""

    arena: Arena | None = None

    @contextmanager
    def of(self, arena: Arena | None) -> Iterator[None]:
        """Within, large ones lie in there while there is room: fresh memory costs a page fault per 4 KiB, and the C
        library gives large pieces back as soon as they are free, so of a long prompt that took up to a sixth.
        """
        before, self.arena = self.arena, arena
        try:
            yield
        finally:
            self.arena = before


lending = _Lending()


def _placed(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Unless somebody looks at what torch makes, who is to see all of it."""
    arena, dtype = lending.arena, dtype or like.dtype
    if arena is None or prod(shape) * dtype.itemsize < LARGE or _get_current_dispatch_mode() is not None:
        return like.new_empty(shape, dtype=dtype)
    try:
        return arena.empty(shape, dtype)
    except ArenaFullError:  # the system has more
        return like.new_empty(shape, dtype=dtype)


def _empty() -> Callable[..., Tensor]:
    value = os.environ.get("QUIRE_DEBUG_KERNELS", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"QUIRE_DEBUG_KERNELS is {value!r}; it must be '0' or '1'")
    return _poisoned if value == "1" else _placed


empty = _empty()
"""`empty(like, *shape, dtype=None)`: the memory of an output, which is not for long. With QUIRE_DEBUG_KERNELS=1 it is
filled first with what is no result, so that an element that a kernel does not write shows."""
