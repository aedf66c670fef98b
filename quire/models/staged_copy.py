# SPDX-License-Identifier: Apache-2.0
"""Loading of file tensors onto a device through pinned memory, overlapping reads, copies and computation.

In a plain copy from the mapped file, the host touches every page, the driver copies it again into its own memory, and
all wait for each other. Here threads read into a few pinned buffers, which are copied one after the other on a separate
stream; dtypes are converted on the device, which is idle at that time.

Invariant: a buffer is reused only after its last copy is done, so the overhead beside the model is these few buffers,
on the host and on the device.
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


class InFlightCopy(Protocol):
    """Copy in flight."""

    def synchronize(self) -> None:
        """Block until the copy is complete."""


class CopyStream(Protocol):
    """Stream of copies to a device, beside its compute stream."""

    def memory(self, num_bytes: int) -> Tensor:
        """Return pinned host memory."""

    def begin(self) -> None:
        """Order later copies after all computation launched so far."""

    def send(self, staged: Tensor, slot: Slot) -> InFlightCopy:
        """Fill a device slot from a tensor in pinned memory."""

    def end(self) -> None:
        """Order later computation after all copies sent so far."""


class GpuCopyStream:
    """Copy stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def send(self, staged: Tensor, slot: Slot) -> InFlightCopy:
        # Memory allocated on this stream is reused only by this stream.
        with self._module.stream(self._stream):
            slot.fill(staged.to(self._device, non_blocking=True))
            event: InFlightCopy = self._module.Event()
            event.record(self._stream)  # type: ignore[attr-defined]
        return event

    def end(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)


@dataclass
class _Buffer:
    memory: Tensor
    last_copy: InFlightCopy | None = None

    def wait(self) -> None:
        """Block until the buffer may be overwritten."""
        if self.last_copy is not None:
            self.last_copy.synchronize()


@dataclass(frozen=True)
class _SlotPart:
    """Slot, or a part of it that fits into a buffer."""

    file: TensorFile
    info: TensorInfo
    slot: Slot

    def read(self, buffer: Tensor) -> Tensor:
        """Read the part into a buffer; return it as a tensor."""
        box, dtype = self.slot.source.box, self.info.dtype
        raw = buffer[: math.prod(sizes(box)) * dtype.itemsize]
        self.file.read_part_into(self.info, box, raw)
        return raw.view(dtype).view(sizes(box))


class StagedCopy:
    """Reader that fills slots through pinned buffers; see `TensorReader`."""

    def __init__(self, stream: CopyStream, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._buffers = deque(_Buffer(stream.memory(buffer_bytes)) for _ in range(NUM_BUFFERS))
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "read weights")

    def fill(self, parts: Iterable[tuple[TensorFile, TensorInfo, Slot]]) -> None:
        self._stream.begin()
        reading: deque[tuple[_SlotPart, _Buffer, Future[Tensor]]] = deque()
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

    def _send(self, piece: _SlotPart, buffer: _Buffer, read: Future[Tensor]) -> None:
        buffer.last_copy = self._stream.send(read.result(), piece.slot)
        self._buffers.append(buffer)

    def _pieces(self, file: TensorFile, info: TensorInfo, slot: Slot) -> Iterator[_SlotPart]:
        max_elements = self._buffer_bytes // info.dtype.itemsize
        return (_SlotPart(file, info, piece) for piece in _cut(slot, max_elements))


def _cut(slot: Slot, max_elements: int, dim: int = 0) -> Iterator[Slot]:
    """Split a slot (single index in dimensions before `dim`) into parts of at most `max_elements` of the file."""
    shape = sizes(slot.source.box)
    if math.prod(shape) <= max_elements:
        yield replace(slot, adopt=None)
        return
    step = max(max_elements // math.prod(shape[dim + 1 :]), 1)
    for start in range(0, shape[dim], step):
        yield from _cut(slot.narrow(dim, start, min(start + step, shape[dim])), max_elements, dim + 1)
