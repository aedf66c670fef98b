# SPDX-License-Identifier: Apache-2.0
"""Windows of a sound, cut where it is quietest, and the sound's file.

Invariant: a window's samples are read when it is reached; a file of hours is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.speech.features import RATE, Samples

QUIET_SAMPLES = RATE // 10
SEARCHED = 0.15  # Of a window, at its end: 4.5 s of 30.
STEP = RATE // 100


class Window(NamedTuple):
    """Samples [start, end) of a sound."""

    start: int
    end: int

    @property
    def start_s(self) -> float:
        return self.start / RATE

    @property
    def end_s(self) -> float:
        return self.end / RATE


class PcmFile:
    """File of float32 mono samples at 16 kHz."""

    def __init__(self, path: Path) -> None:
        self.num_samples = path.stat().st_size // 4
        self._samples = np.memmap(path, dtype=np.float32, mode="r", shape=(self.num_samples,))

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return self.num_samples / RATE

    def read(self, start: int, end: int) -> Samples:
        """Return a copy of the samples [start, end)."""
        return np.array(self._samples[start:end])


def windows_of(sound: PcmFile, window_samples: int) -> Iterator[Window]:
    """Yield windows of at most `window_samples` that cover the sound, each cut in its quietest 100 ms near its end."""
    start = 0
    while sound.num_samples - start > window_samples:
        end = start + window_samples
        first = end - max(int(window_samples * SEARCHED), 1)
        cut = first + quietest(sound.read(first, end))
        yield Window(start, cut)
        start = cut
    yield Window(start, sound.num_samples)


def quietest(samples: Samples) -> int:
    """Return the middle of the quietest 100 ms; of equally quiet ones the last."""
    size = min(QUIET_SAMPLES, len(samples))
    sums = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    starts = np.arange(len(samples) - size, -1, -STEP)
    energies = sums[starts + size] - sums[starts]
    return max(1, int(starts[int(energies.argmin())]) + size // 2)
