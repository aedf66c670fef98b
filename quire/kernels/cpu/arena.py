"""Memory of a fixed size for tensors, the place of each of which is taken again when it is gone."""

import math
from bisect import insort
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGNMENT = 64


class ArenaFullError(Exception):
    """There is no room for a tensor."""


class Arena:
    """Memory of a fixed size for tensors: those of one step and then the next, or of tapes that never play at once.

    Every tape begins at its start, and within a tape or step the place of a tensor that is gone is used again (first
    fit), so all together take what the largest of them takes. Pages that nobody has reached cost no memory.
    """

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self._bytes: NDArray[np.uint8] = memory[start : start + num_bytes]
        self._taken: list[_Place] = []
        self.peak_bytes = 0
        """What the largest of them has taken so far."""

    def begin(self) -> None:
        """Another tape begins: what the others left in their tensors is no longer read."""
        self._taken = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, not initialised.

        Raises:
            ArenaFullError: there is no room for it.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._first_fit(-(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT)
        tensor = self.at(start, shape, dtype)
        user = StorageWeakRef(tensor.untyped_storage())
        insort(self._taken, _Place(start, start + num_bytes, user), key=_start_of)
        self.peak_bytes = max(self.peak_bytes, start + num_bytes)
        return tensor

    def at(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor whose memory begins there; it takes no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._bytes[start : start + num_bytes]).view(dtype).view(shape)

    def start_of(self, tensor: Tensor) -> int:
        """Where a tensor's memory begins, for one in here."""
        return tensor.data_ptr() - int(self._bytes.ctypes.data)

    def held_by_tape(self, value: Any) -> Any:
        """For a tape to keep: a tensor in here becomes one at the same address that takes no room."""
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
