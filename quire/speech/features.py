# SPDX-License-Identifier: Apache-2.0
"""Log-mel spectrograms with the values of transformers' WhisperFeatureExtractor.

Invariant: a spectrum of `BLOCK_FRAMES` is in memory at a time; a caller with a long file computes window by window.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

RATE = 16_000
HOP = 160
FFT = 400
FLOOR = 1e-10
BLOCK_FRAMES = 3000  # Frames of which the spectrum is in memory at once.
LOG_STEP = 27.0 / np.log(6.4)  # Of the mel scale above 1 kHz, where it is logarithmic.
LINEAR_HZ, LINEAR_MEL = 1000.0, 15.0

Samples = NDArray[np.float32]


def log_mel(samples: Samples, num_bins: int, num_frames: int) -> NDArray[np.float32]:
    """Return the spectrogram [num_bins, num_frames] of mono samples at 16 kHz.

    Args:
        samples: at most `num_frames * HOP` of them; the rest of the window is silence.
    """
    padded = np.zeros(num_frames * HOP, dtype=np.float64)
    padded[: len(samples)] = samples
    frames = sliding_window_view(np.pad(padded, FFT // 2, mode="reflect"), FFT)[: num_frames * HOP : HOP]
    log = np.empty((num_bins, num_frames), dtype=np.float32)
    for first in range(0, num_frames, BLOCK_FRAMES):
        block = slice(first, first + BLOCK_FRAMES)
        log[:, block] = _log_power(frames[block], num_bins)
    log = np.maximum(log, log.max() - 8.0)
    return np.asarray((log + 4.0) / 4.0, dtype=np.float32)


def _log_power(frames: NDArray[np.float64], num_bins: int) -> NDArray[np.float64]:
    """Return the logarithm [num_bins, n] of the power of frames [n, FFT]."""
    spectrum = np.fft.rfft(frames * _window()).astype(np.complex64)
    power = np.abs(spectrum, dtype=np.float64) ** 2
    return np.asarray(np.log10(np.maximum(FLOOR, mel_filters(num_bins).T @ power.T)), dtype=np.float64)


@functools.cache
def mel_filters(num_bins: int) -> NDArray[np.float64]:
    """Return Slaney's triangular filters [FFT / 2 + 1, num_bins] from 0 to 8 kHz, each of the same area."""
    frequencies = np.linspace(0, RATE // 2, FFT // 2 + 1)
    edges = _to_hertz(np.linspace(_to_mel(0.0), _to_mel(RATE / 2), num_bins + 2))
    slopes = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    down, up = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    areas = 2.0 / (edges[2:] - edges[:-2])
    return np.asarray(np.maximum(0.0, np.minimum(down, up)) * areas, dtype=np.float64)


@functools.cache
def _window() -> NDArray[np.float64]:
    """Return Hann's window [FFT], periodic."""
    return np.hanning(FFT + 1)[:-1]


def _to_mel(hertz: float) -> float:
    if hertz < LINEAR_HZ:
        return 3.0 * hertz / 200.0
    return float(LINEAR_MEL + np.log(hertz / LINEAR_HZ) * LOG_STEP)


def _to_hertz(mels: NDArray[Any]) -> NDArray[np.float64]:
    curved = LINEAR_HZ * np.exp((mels - LINEAR_MEL) / LOG_STEP)
    return np.where(mels >= LINEAR_MEL, curved, 200.0 * mels / 3.0)
