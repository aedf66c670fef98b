# SPDX-License-Identifier: Apache-2.0
"""Sounds of Phi-4-multimodal (2025, arXiv:2503.01743): Kaldi's log-mel spectrogram, of which 8 frames are a token.

Invariant: spectrograms are transformers', by numpy in place of torch. Its extractor skips what is left of a sound after
the last whole frame, and so does this one.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.models.json_object import JsonObject, optional_json_object
from quire.multimodal.processors.base import Prepared
from quire.multimodal.processors.files import IMAGE_FILE, PROCESSOR_FILE, token_of
from quire.multimodal.processors.sound import EXTRACTOR, FEATURES, SoundProcessor
from quire.speech.features import BLOCK_FRAMES, HOP, RATE, Samples

SOUND_TOKEN = "<|endoftext11|>"  # In files that name none.
BINS = 80
FRAME, FFT = 400, 512  # Samples of a frame, and with the zeros behind it.
REDUCTION = 8  # Frames per embedding.
LONGEST_S = 1800.0  # As its authors say.
_EMPHASIS = np.float32(0.97)
_FULL_SCALE = np.float32(32768.0)
_HIGHEST_HZ = 7690.0
_ONLY = {
    "sampling_rate": RATE,
    "feature_size": BINS,
    "hop_length": HOP,
    "n_fft": FFT,
    "win_length": FRAME,
    "preemphasis": 0.97,
    "audio_compression_rate": REDUCTION,
    "audio_downsample_rate": 1,
    "audio_feat_stride": 1,
    "mel_min_frequency": 0,
    "mel_max_frequency": _HIGHEST_HZ,
}
_INSIDE = ("audio_processor", EXTRACTOR)


class Phi4Sounds(SoundProcessor):
    """One run of embeddings, whose projection depends on whether there are images in the prompt."""

    heeds_images = True
    longest_s = LONGEST_S

    def __init__(self, model_dir: Path) -> None:
        extractor = _extractor(model_dir)
        for key, value in _ONLY.items():
            extractor.only(key, value)
        self.placeholder = self.marker = token_of(model_dir, "audio_token", SOUND_TOKEN)
        self.literals = (self.placeholder,)

    def prepare(self, samples: Samples) -> Prepared:
        if len(samples) < FRAME:
            raise ValidationError(
                f"the sound has {len(samples)} samples at 16 kHz, and this model takes at least {FRAME}"
            )
        features = kaldi_log_mel(samples)
        count = math.ceil(len(features) / REDUCTION)
        return self._prepared({FEATURES: features[None]}, ((self.placeholder, count),))


def _extractor(model_dir: Path) -> JsonObject:
    """Return the options of the feature extractor, which most files do not have."""
    processor = optional_json_object(model_dir / PROCESSOR_FILE)
    inside = next((key for key in _INSIDE if key in processor), None)
    return processor.child(inside) if inside else optional_json_object(model_dir / IMAGE_FILE)


def kaldi_log_mel(samples: Samples) -> NDArray[np.float32]:
    """Return the spectrogram [frames, BINS] of mono samples at 16 kHz, at least FRAME of them."""
    frames = sliding_window_view(np.asarray(samples, np.float32), FRAME)[::HOP]
    blocks = (frames[first : first + BLOCK_FRAMES] for first in range(0, len(frames), BLOCK_FRAMES))
    return np.concatenate([_log_power(block) for block in blocks])


def _log_power(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    before = np.concatenate((frames[:, :1], frames[:, :-1]), 1)
    emphasized = (frames - _EMPHASIS * before) * _FULL_SCALE
    spectrum = np.fft.rfft(np.hamming(FRAME) * emphasized, n=FFT).astype(np.complex64)
    power = np.abs(spectrum) ** 2
    return np.log(np.maximum(power @ _filters(), np.float32(1.0)))


@functools.cache
def _filters() -> NDArray[np.float32]:
    """Return Kaldi's triangular filters [FFT / 2 + 1, BINS], whose sides are straight on the mel scale."""
    mels = _to_mel(np.arange(FFT // 2 + 1) * (RATE / FFT))
    edges = np.linspace(0.0, _to_mel(np.array(_HIGHEST_HZ)), BINS + 2)
    slopes, widths = edges[None, :] - mels[:, None], np.diff(edges)
    down, up = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(down, up)).astype(np.float32)


def _to_mel(hertz: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(1127.0 * np.log(1.0 + hertz / 700.0))
