# SPDX-License-Identifier: Apache-2.0
"""Fixed-size arena for tensors with reuse of freed space, and memory on huge pages.

On pages of 2 MiB, scattered reads cause far fewer TLB misses. Invariant: huge pages change placement and speed only;
they are requested on Linux only.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from ctypes import CDLL, c_size_t, c_void_p
from math import prod
from mmap import PAGESIZE
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quire.kernels.cpu import library

HUGE_PAGE = 2 * 2**20
MADV_DONTNEED = 4  # of Linux


def prefer_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a tensor's memory, which must be contiguous; best before it is first written."""
    loaded = library.loaded()
    if loaded is not None:
        loaded.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


def huge_page_memory(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor of that shape, starting on a huge page if it is large enough to contain one.

    A weight of a little over 2 MiB that starts anywhere else contains no whole page. Skipped bytes are never touched.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return like.new_empty(shape, dtype=dtype)
    memory = like.new_empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes].view(dtype).view(shape)


def huge_page_blocks(num_blocks: int, block_bytes: int) -> Tensor:
    """Return uninitialized uint8 [num_blocks, block_bytes] on huge pages from the first byte on.

    Blocks are filled from the first one on, and would first be on small pages, before the first huge one.
    """
    memory = huge_page_memory(torch.empty(0), num_blocks, block_bytes, dtype=torch.uint8)
    prefer_huge_pages(memory)
    return memory


def discard_pages(tensor: Tensor) -> bool:
    """Return a tensor's whole pages to the system; its address stays valid, and its contents are undefined.

    The tensor must be contiguous and own its memory. False: the system, which must be Linux, refuses.
    """
    start = -(-tensor.data_ptr() // PAGESIZE) * PAGESIZE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - start) // PAGESIZE * PAGESIZE
    if num_bytes <= 0:
        return True
    if sys.platform != "linux":  # elsewhere the advice keeps the pages
        return False
    return bool(CDLL(None).madvise(c_void_p(start), c_size_t(num_bytes), MADV_DONTNEED) == 0)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Copy a tensor into such memory; a small tensor is returned unchanged."""
    if tensor.nbytes < HUGE_PAGE:
        return tensor
    return huge_page_memory(tensor, *tensor.shape, dtype=tensor.dtype).copy_(tensor)


_ALIGNMENT = 64


class ArenaFullError(Exception):
    """Raised if there is no space for a tensor."""


class Arena:
    """Fixed-size memory for the tensors of successive steps, or of recorded graphs that never replay at once.

    Every graph starts at the beginning, and within a graph or step the space of a freed tensor is reused (first fit),
    so all together take as much as the largest. Untouched pages cost no memory.
    """

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self._bytes: NDArray[np.uint8] = memory[start : start + num_bytes]
        self._taken: list[_Place] = []
        self.peak_bytes = 0
        """Largest extent used so far."""

    def discard(self) -> None:
        """Return its pages to the system; no tensor is in use."""
        discard_pages(torch.from_numpy(self._bytes))

    def begin(self) -> None:
        """Begin another graph: tensors of the previous ones are no longer read."""
        self._taken = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of this shape.

        Raises:
            ArenaFullError: there is no space for it.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._first_fit(-(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT)
        tensor = self.at(start, shape, dtype)
        user = StorageWeakRef(tensor.untyped_storage())
        insort(self._taken, _Place(start, start + num_bytes, user), key=_start_of)
        self.peak_bytes = max(self.peak_bytes, start + num_bytes)
        return tensor

    def at(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at a byte offset without reserving space."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._bytes[start : start + num_bytes]).view(dtype).view(shape)

    def start_of(self, tensor: Tensor) -> int:
        """Return the byte offset of a tensor in the arena."""
        return tensor.data_ptr() - int(self._bytes.ctypes.data)

    def unreserved(self, value: Any) -> Any:
        """Return a value for a graph to keep: an arena tensor becomes one at the same address that reserves no
        space."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        start = storage.data_ptr() - self._bytes.ctypes.data
        if not 0 <= start < len(self._bytes):
            return value
        end = start + storage.nbytes() // value.itemsize * value.itemsize
        memory = torch.from_numpy(self._bytes[start:end]).view(value.dtype)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    def _first_fit(self, num_bytes: int) -> int:
        self._taken = [place for place in self._taken if not place.user.expired()]
        start = 0
        for place in self._taken:
            if place.start - start >= num_bytes:
                break
            start = -(-place.end // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > len(self._bytes):
            raise ArenaFullError(f"its tensors take more than the {len(self._bytes)} bytes kept for them")
        return start


class _Place(NamedTuple):
    """Bytes of the arena, and the tensor storage that uses them."""

    start: int
    end: int
    user: StorageWeakRef


_start_of = attrgetter("start")
