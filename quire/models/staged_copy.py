"""Brings tensors of files onto a device through pinned memory, so that reading, copying and computing overlap.

In a plain copy from the mapped file, the host touches every page, the driver copies it once more to memory of its own,
and all of them wait for each other. Here threads read into a few pinned buffers, each of which is copied, behind the
others, on a stream of its own; a dtype is converted on the device, which is not busy yet.

Invariant: a buffer is written to only when its last copy is done, so beside the model there are never more than these
few buffers, on the host and on the device.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.layers.base import Slot
from quire.models.safetensors_file import SafetensorsFile, TensorInfo

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
    """Part of a tensor that fits into a buffer."""

    file: SafetensorsFile
    start: int
    """In the file."""
    dtype: torch.dtype
    slot: Slot

    @property
    def num_bytes(self) -> int:
        return self.slot.target.numel() * self.dtype.itemsize

    def read(self, buffer: Tensor) -> Tensor:
        """The piece, in the memory of a buffer."""
        raw = buffer[: self.num_bytes]
        self.file.read_into(self.start, raw)
        return raw.view(self.dtype).view(self.slot.target.shape)


class StagedCopy:
    """Fills slots from files by way of pinned buffers; see `TensorReader`."""

    def __init__(self, stream: CopyStream, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._buffers = deque(_Buffer(stream.memory(buffer_bytes)) for _ in range(NUM_BUFFERS))
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "read weights")

    def fill(self, parts: Iterable[tuple[SafetensorsFile, TensorInfo, Slot]]) -> None:
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

    def _pieces(self, file: SafetensorsFile, info: TensorInfo, slot: Slot) -> Iterator[_Piece]:
        start = info.start
        for target in _views(slot.target, info.dtype.itemsize, self._buffer_bytes):
            piece = _Piece(file, start, info.dtype, replace(slot, target=target, adopt=None))
            yield piece
            start += piece.num_bytes


def _views(tensor: Tensor, itemsize: int, max_bytes: int) -> Iterator[Tensor]:
    """Parts of a tensor in the order of its elements, each of so many bytes at most as the file holds it."""
    if tensor.numel() * itemsize <= max_bytes:
        yield tensor
        return
    rows = max_bytes // (tensor[0].numel() * itemsize)
    for part in tensor.split(rows) if rows else tensor:
        yield from _views(part, itemsize, max_bytes)
