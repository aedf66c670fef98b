"""Brings tensors of files onto a device through pinned memory, so that reading, copying and computing overlap.

In a plain copy from the mapped file, the host touches every page, the driver copies it once more to memory of its own,
and all of them wait for each other. Here threads read into a few pinned buffers, each of which is copied, behind the
others, on a stream of its own; a dtype is converted on the device, which is not busy yet.

Invariant: a buffer is written to only when its last copy is done, so beside the model there are never more than these
few buffers, on the host and on the device.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.layers.slot import Slot, sizes
from quire.models.tensor_file import TensorFile, TensorInfo

BUFFER_BYTES = 16 << 20
NUM_BUFFERS = 8
MAX_THREADS = 6


class Copied(Protocol):
    """A copy that is on its way."""

    def synchronize(self) -> None:
        """Until it has arrived."""


class CopyStream(Protocol):
    """An order of copies to a device, beside the order in which it computes."""

    def memory(self, num_bytes: int) -> Tensor:
        """Bytes of the host that it copies from without help of the driver."""

    def begin(self) -> None:
        """Put what is sent from now on behind all that is to be computed so far."""

    def send(self, staged: Tensor, slot: Slot) -> Copied:
        """Fill a slot of the device from a tensor in such memory."""

    def end(self) -> None:
        """Put what is to be computed from now on behind all that was sent so far."""


class GpuCopyStream:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def send(self, staged: Tensor, slot: Slot) -> Copied:
        # What lands on the device in between is this stream's memory: only this stream uses it again.
        with self._module.stream(self._stream):
            slot.fill(staged.to(self._device, non_blocking=True))
            event: Copied = self._module.Event()
            event.record(self._stream)  # type: ignore[attr-defined]
        return event

    def end(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)


@dataclass
class _Buffer:
    memory: Tensor
    last_copy: Copied | None = None

    def wait(self) -> None:
        """Until it may be written to."""
        if self.last_copy is not None:
            self.last_copy.synchronize()


@dataclass(frozen=True)
class _Piece:
    """A slot, or as much of it as fits into a buffer."""

    file: TensorFile
    info: TensorInfo
    slot: Slot

    def read(self, buffer: Tensor) -> Tensor:
        """The piece, in the memory of a buffer."""
        box, dtype = self.slot.source.box, self.info.dtype
        raw = buffer[: math.prod(sizes(box)) * dtype.itemsize]
        self.file.read_part_into(self.info, box, raw)
        return raw.view(dtype).view(sizes(box))


class StagedCopy:
    """Fills slots from files by way of pinned buffers; see `TensorReader`."""

    def __init__(self, stream: CopyStream, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._buffers = deque(_Buffer(stream.memory(buffer_bytes)) for _ in range(NUM_BUFFERS))
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "read weights")

    def fill(self, parts: Iterable[tuple[TensorFile, TensorInfo, Slot]]) -> None:
        self._stream.begin()
        reading: deque[tuple[_Piece, _Buffer, Future[Tensor]]] = deque()
        for part in parts:
            for piece in self._pieces(*part):
                if len(reading) == NUM_BUFFERS:
                    self._send(*reading.popleft())
                buffer = self._buffers.popleft()
                buffer.wait()
                reading.append((piece, buffer, self._threads.submit(piece.read, buffer.memory)))
        while reading:
            self._send(*reading.popleft())
        self._stream.end()

    def close(self) -> None:
        self._threads.shutdown()

    def _send(self, piece: _Piece, buffer: _Buffer, read: Future[Tensor]) -> None:
        buffer.last_copy = self._stream.send(read.result(), piece.slot)
        self._buffers.append(buffer)

    def _pieces(self, file: TensorFile, info: TensorInfo, slot: Slot) -> Iterator[_Piece]:
        max_elements = self._buffer_bytes // info.dtype.itemsize
        return (_Piece(file, info, piece) for piece in _cut(slot, max_elements))


def _cut(slot: Slot, max_elements: int, dim: int = 0) -> Iterator[Slot]:
    """A slot, of one index in the dimensions before `dim`, in pieces that take so many elements of the file at most."""
    shape = sizes(slot.source.box)
    if math.prod(shape) <= max_elements:
        yield replace(slot, adopt=None)
        return
    step = max(max_elements // math.prod(shape[dim + 1 :]), 1)
    for start in range(0, shape[dim], step):
        yield from _cut(slot.narrow(dim, start, min(start + step, shape[dim])), max_elements, dim + 1)
