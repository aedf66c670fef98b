# SPDX-License-Identifier: Apache-2.0
"""Resampling of mono sound in blocks: soxr where it is installed, else a windowed-sinc filter in numpy.

Invariant: the samples do not depend on how the input is divided into blocks.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.speech.features import Samples

LOBES = 32  # Zero crossings of the filter on each side.
CUTOFF = 0.95  # Of the lower of the two Nyquist frequencies.
KAISER_BETA = 9.0
MAX_FILTER = 2**22  # Coefficients of all phases; two rates with a larger filter are rounded.


class Resampler(Protocol):
    """Stream from one rate to another."""

    def feed(self, samples: Samples) -> Samples:
        """Return the samples that the input so far determines."""
        ...

    def finish(self) -> Samples:
        """Return the rest."""
        ...


class SameRate:
    """Stream without resampling."""

    def feed(self, samples: Samples) -> Samples:
        return samples

    def finish(self) -> Samples:
        return np.empty(0, dtype=np.float32)


class SoxrResampler:
    """Stream through soxr at high quality."""

    def __init__(self, soxr: Any, rate: int, target: int) -> None:
        self._stream = soxr.ResampleStream(rate, target, 1, dtype="float32", quality="HQ")

    def feed(self, samples: Samples) -> Samples:
        return np.asarray(self._stream.resample_chunk(samples), dtype=np.float32)

    def finish(self) -> Samples:
        last = self._stream.resample_chunk(np.empty(0, dtype=np.float32), last=True)
        return np.asarray(last, dtype=np.float32)


class SincResampler:
    """Polyphase filter: output k is the sum of the input around k * rate / target under a sinc with Kaiser's window."""

    def __init__(self, rate: int, target: int) -> None:
        common = math.gcd(rate, target)
        self._up, self._down = target // common, rate // common
        reach = math.ceil(LOBES * max(1.0, rate / target) / CUTOFF)
        if self._up * 2 * reach > MAX_FILTER:
            self._up, self._down = _near_ratio(rate, target, MAX_FILTER // (2 * reach))
        self._reach = reach
        self._filter = _phases(self._up, min(1.0, target / rate) * CUTOFF, reach)
        self._pending = np.zeros(reach, dtype=np.float32)  # Begins at input sample `_first`.
        self._first = -reach
        self._num_input = self._num_output = 0

    def feed(self, samples: Samples) -> Samples:
        self._num_input += len(samples)
        self._pending = np.concatenate([self._pending, samples])
        end = self._first + len(self._pending) - self._reach  # Centers before this have all their input.
        return self._until(-(-end * self._up // self._down))

    def finish(self) -> Samples:
        self._pending = np.concatenate([self._pending, np.zeros(self._reach + 1, dtype=np.float32)])
        return self._until(-(-self._num_input * self._up // self._down))

    def _until(self, num_output: int) -> Samples:
        """Return the output samples from the last one on to this number."""
        numbers = np.arange(self._num_output, max(num_output, self._num_output), dtype=np.int64)
        centers, phases = np.divmod(numbers * self._down, self._up)
        out = np.zeros(len(numbers), dtype=np.float64)
        starts = centers - self._reach + 1 - self._first
        for tap in range(2 * self._reach):  # one order of summation for every sample, whatever the blocks
            out += self._pending[starts + tap] * self._filter[tap, phases]
        self._num_output += len(numbers)
        passed = self._num_output * self._down // self._up - self._reach + 1 - self._first
        if passed > 0:
            self._pending = self._pending[passed:]
            self._first += passed
        return out.astype(np.float32)


def _phases(up: int, cutoff: float, reach: int) -> NDArray[np.float64]:
    """Return the filter [2 * reach, up]: weight of the tap for an output at each fraction of an input sample."""
    taps = np.arange(-reach + 1, reach + 1, dtype=np.float64)[:, None]
    distance = taps - np.arange(up, dtype=np.float64)[None, :] / up
    inside = np.sqrt(np.maximum(0.0, 1.0 - (distance / reach) ** 2))
    weights = cutoff * np.sinc(cutoff * distance) * np.i0(KAISER_BETA * inside) / np.i0(KAISER_BETA)
    return np.asarray(weights / weights.sum(axis=0), dtype=np.float64)


def _near_ratio(rate: int, target: int, most_up: int) -> tuple[int, int]:
    """Return a fraction near target / rate with a numerator at most `most_up`."""
    up = max(1, most_up)
    down = max(1, round(up * rate / target))
    common = math.gcd(up, down)
    return up // common, down // common


def make_resampler(rate: int, target: int, *, use_soxr: bool = True) -> Resampler:
    """Return a resampler from `rate` to `target` samples per second."""
    if rate == target:
        return SameRate()
    if use_soxr:
        try:
            return SoxrResampler(importlib.import_module("soxr"), rate, target)
        except ModuleNotFoundError:
            pass  # the filter here is as good, and slower
    return SincResampler(rate, target)
