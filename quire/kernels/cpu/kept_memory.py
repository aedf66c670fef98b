"""Memory for large results, taken from what earlier ones have left.

Memory that is fresh from the system costs a page fault per 4 KiB when a kernel writes it, and the C library gives large
pieces back as soon as they are free: of a long prompt that was a sixth of the time. So they are kept here, as Python
frees tensors, and lent again.

Invariant: what is kept, lent or not, is never more than was lent at one time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quire.kernels.cpu import library

LARGE = 1 << 20
"""Bytes of a result from which on it is worth the microseconds that Python takes for it."""
MOST_WASTED = 0.25
"""Of a result's bytes: by how much what it lies in may be longer, since a step has some more tokens than the next."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Some memory, and the storage of the last tensor that it was lent to."""

    memory: Tensor
    user: StorageWeakRef

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Its first bytes as a tensor of a storage of its own, whose end shows that nobody uses it any more."""
        num_bytes = prod(shape) * dtype.itemsize
        tensor = torch.from_numpy(self.memory.numpy()[:num_bytes]).view(dtype).view(shape)
        self.user = StorageWeakRef(tensor.untyped_storage())
        return tensor


class KeptMemory:
    """See above. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        """Those that were lent last stand last."""
        self._most = 0

    @property
    def num_bytes(self) -> int:
        """What is kept, lent or not."""
        return sum(piece.num_bytes for piece in self._pieces)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, not initialised, whose memory is nobody else's until it is gone."""
        num_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            piece = self._fitting(num_bytes)
            if piece is None:
                piece = self._new(num_bytes)
            else:
                self._pieces.remove(piece)
            self._pieces.append(piece)
            return piece.lend(shape, dtype)

    def clear(self) -> None:
        """Give back what nobody uses."""
        with self._lock:
            self._pieces = [piece for piece in self._pieces if not piece.user.expired()]
            self._most = self.num_bytes

    def _fitting(self, num_bytes: int) -> _Piece | None:
        """The smallest that is free and long enough, and not too long."""
        longest = num_bytes * (1 + MOST_WASTED)
        fitting = [
            piece
            for piece in self._pieces
            if num_bytes <= piece.num_bytes <= longest and piece.user.expired()
        ]
        return min(fitting, key=lambda piece: piece.num_bytes, default=None)

    def _new(self, num_bytes: int) -> _Piece:
        """In the place of those that have not been used for longest."""
        lent = sum(piece.num_bytes for piece in self._pieces if not piece.user.expired())
        self._most = max(self._most, lent + num_bytes)
        for piece in [piece for piece in self._pieces if piece.user.expired()]:
            if self.num_bytes + num_bytes <= self._most:
                break
            self._pieces.remove(piece)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        loaded = library.loaded()
        if loaded is not None:
            loaded.prefer_huge_pages(memory.data_ptr(), num_bytes)
        return _Piece(memory, StorageWeakRef(memory.untyped_storage()))


KEPT = KeptMemory()
"""That of this process."""
