# SPDX-License-Identifier: Apache-2.0
"""WAV files: integers of 8 to 32 bits and floats, of any number of channels and samples per second."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import ValidationError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MAX_CHANNELS = 64
MAX_FORMAT_BYTES = 4096
BLOCK_FRAMES = 2**16
UNKNOWN = 0xFFFFFFFF  # Size of a stream that was not known when its header was written.


class WavFormat(NamedTuple):
    """Form of a file's samples; `start` and `end` are the place of the data in bytes."""

    kind: int
    channels: int
    rate: int
    bits: int
    start: int
    end: int

    @property
    def is_plain(self) -> bool:
        """True if `read_wav` reads it."""
        return (self.kind, self.bits) in _READERS


def _unsigned(raw: NDArray[Any]) -> NDArray[np.float32]:
    return (raw.astype(np.float32) - 128.0) / np.float32(128.0)


def _signed(raw: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(raw / 2.0 ** (8 * raw.dtype.itemsize - 1), dtype=np.float32)


def _three_bytes(raw: NDArray[Any]) -> NDArray[np.float32]:
    wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
    wide[:, 1:] = raw.reshape(-1, 3)
    return _signed(wide.view("<i4")[:, 0])


def _float(raw: NDArray[Any]) -> NDArray[np.float32]:
    return raw.astype(np.float32)


_READERS: dict[tuple[int, int], tuple[str, Any]] = {
    (PCM, 8): ("u1", _unsigned),
    (PCM, 16): ("<i2", _signed),
    (PCM, 24): ("u1", _three_bytes),
    (PCM, 32): ("<i4", _signed),
    (FLOAT, 32): ("<f4", _float),
    (FLOAT, 64): ("<f8", _float),
}


def read_header(path: Path) -> WavFormat | None:
    """Return the form of a WAV file; None if the file is none.

    Raises:
        ValidationError: its header is malformed or truncated.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
        if head[:4] not in (b"RIFF", b"RF64") or head[8:] != b"WAVE":
            return None
        found: tuple[int, int, int, int] | None = None
        while len(header := file.read(8)) == 8:
            name, length = header[:4], struct.unpack("<I", header[4:])[0]
            start = file.tell()
            if name == b"fmt ":
                found = _format(file, length)
            elif name == b"data":
                if found is None:
                    break
                # A stream's length is unknown; what is there counts.
                end = size if length in (0, UNKNOWN) else min(size, start + length)
                return WavFormat(*found, start, end)
            file.seek(start + length + length % 2)
    raise ValidationError("the WAV file ends before its samples, or has no format", param="file")


def _format(file: BinaryIO, length: int) -> tuple[int, int, int, int]:
    chunk = file.read(min(length, MAX_FORMAT_BYTES))
    if len(chunk) < 16:
        raise ValidationError("the WAV file ends inside its header", param="file")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == EXTENSIBLE and len(chunk) >= 26:
        (kind,) = struct.unpack_from("<H", chunk, 24)
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValidationError(
            f"the WAV file has {channels} channels; 1 to {MAX_CHANNELS} are read", param="file"
        )
    return kind, channels, rate, bits


def read_wav(path: Path, form: WavFormat) -> Iterator[NDArray[np.float32]]:
    """Yield blocks [frames, channels]; a last frame that is not whole is dropped."""
    dtype, convert = _READERS[form.kind, form.bits]
    frame = form.channels * form.bits // 8
    with path.open("rb") as file:
        file.seek(form.start)
        left = (form.end - form.start) // frame
        while left > 0:
            block = file.read(min(left, BLOCK_FRAMES) * frame)
            left -= BLOCK_FRAMES
            yield convert(np.frombuffer(block, dtype)).reshape(-1, form.channels)
