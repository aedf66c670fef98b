# SPDX-License-Identifier: Apache-2.0
"""Sounds of Gemma 3n and Gemma 4: log-mel spectrograms of a Universal Speech Model (Zhang et al., 2023,
arXiv:2303.01037).

Both have magnitudes in HTK's mel bands every 10 ms, of a sound filled up with silence to a multiple of 128 samples, and
at most 30 s. They differ in this:

- Gemma 3n's frames are 32 ms long and begin with the sound; the logarithm is of a floor at least; a sound is always as
  many embeddings, of which the encoder fills the first and a learned one the others.
- Gemma 4's frames are 20 ms long, the first one begins half a frame before the sound, and those that reach behind it do
  not count; the floor is added; four frames are an embedding.

Invariant: as in `quire.multimodal.processors.sound`, for each sound alone. Of several sounds in one call transformers
fills the shorter ones up with frames of silence, which changes Gemma 3n's last embeddings of these.
Shapes: F frames of N samples, B bands.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from quire.errors import ValidationError
from quire.models.json_object import JsonObject, optional_json_object, read_json_object
from quire.multimodal.processors.base import Placeholders, Prepared
from quire.multimodal.processors.files import PROCESSOR_FILE, token_of
from quire.multimodal.processors.sound import (
    FEATURES,
    SoundProcessor,
    extractor_options,
)
from quire.speech.features import HOP, RATE, Samples

LONGEST_S = 30.0
_FILLED_TO = 128  # Samples; a sound is filled up to a multiple of them.
_MAX_BANDS, _MAX_MS, _MAX_TOKENS = 1024, 1000.0, 2**16
_LEAST_FLOOR = 1e-30
STRIDES = ((2, 2), (2, 2))
CHANNELS, CHANNELS_KEY = (128, 32), "subsampling_conv_channels"
_MAX_SIZE, _MAX_CHANNELS = 64, 2**14

Floats = NDArray[np.floating[Any]]


def pairs_of(
    encoder: JsonObject, key: str, usual: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Return sizes along frames and bands for each convolution of Gemma 3n's encoder."""
    found = encoder.get(key)
    if found is None:
        return usual
    if not isinstance(found, list) or len(found) != len(usual) or not all(map(_is_pair, found)):
        raise encoder.wrong(key, f"{len(usual)} pairs of integers in [1, {_MAX_SIZE}]")
    return tuple((along, across) for along, across in found)


def _is_pair(found: Any) -> bool:
    is_pair = isinstance(found, list) and len(found) == 2
    return is_pair and all(type(size) is int and 0 < size <= _MAX_SIZE for size in found)


def channels_of(encoder: JsonObject, key: str) -> tuple[int, int]:
    """Return the channels of both convolutions of an encoder."""
    found = encoder.get(key)
    if found is None:
        return CHANNELS
    is_pair = isinstance(found, list) and len(found) == len(CHANNELS)
    if not is_pair or not all(type(size) is int and 0 < size <= _MAX_CHANNELS for size in found):
        raise encoder.wrong(key, f"{len(CHANNELS)} integers in [1, {_MAX_CHANNELS}]")
    return found[0], found[1]


class Spectrogram(abc.ABC):
    """Logarithms of the magnitudes in mel bands, by the options of an extractor."""

    usual: ClassVar[Mapping[str, Any]]
    """Values of options that a file lacks."""

    def __init__(self, extractor: JsonObject) -> None:
        given = {key: value for key, value in extractor.values.items() if value is not None}
        options = JsonObject(extractor.where, {**self.usual, **given})
        options.only("sampling_rate", RATE)
        options.only("hop_length_ms", 1000 * HOP / RATE)
        options.only("dither", 0, 0.0)
        self.num_bands = options.integer("feature_size", 128, high=_MAX_BANDS)
        self.frame = round(options.number("frame_length_ms", low=1.0, high=_MAX_MS) * RATE / 1000)
        self._fft = 2 ** math.ceil(math.log2(self.frame)) * (1 + options.flag("fft_overdrive", False))
        self._range = options.number("min_frequency"), options.number("max_frequency", high=RATE / 2)
        self._emphasis = options.number("preemphasis", high=1.0)
        self._is_htk = options.flag("preemphasis_htk_flavor", True)
        self._factor = options.number("input_scale_factor", 1.0)
        self.floor = np.array(options.number("mel_floor", low=_LEAST_FLOOR), np.float64)
        self._mean, self._deviation = (
            self._of_bands(options, key) for key in ("per_bin_mean", "per_bin_stddev")
        )

    def _of_bands(self, options: JsonObject, key: str) -> NDArray[np.float64] | None:
        if key not in options:
            return None
        values = np.array(options.numbers(key))
        if len(values) != self.num_bands:
            raise options.wrong(key, f"a list of {self.num_bands} numbers, one for each band")
        return values

    @property
    def before(self) -> int:
        """Samples of silence before a sound."""
        return 0

    @property
    @abc.abstractmethod
    def window(self) -> NDArray[np.float32]:
        """Hann's window [N], periodic."""

    @abc.abstractmethod
    def floored(self, magnitudes: Floats) -> Floats:
        """Return magnitudes [F, B] of which there are logarithms."""

    def num_frames(self, num_samples: int) -> int:
        """Return the frames within so many samples; a frame needs one more than it has."""
        return max((self.before + num_samples - self.frame - 1) // HOP + 1, 0)

    def compute(self, samples: Samples) -> NDArray[np.float32]:
        """Return the spectrogram [F, B] of mono samples at 16 kHz; F is 0 for too few of them."""
        length = filled(len(samples))
        if not self.num_frames(length):
            return np.empty((0, self.num_bands), np.float32)
        whole = np.zeros(self.before + length, np.float32)
        whole[self.before : self.before + len(samples)] = samples
        if self._factor != 1.0:
            whole = whole * self._factor
        frames = self._emphasized(sliding_window_view(whole, self.frame + 1)[::HOP])
        magnitudes = np.abs(np.fft.rfft(frames * self.window, n=self._fft, axis=-1))
        found: Floats = np.log(self.floored(np.matmul(magnitudes, self._bands)))
        if self._mean is not None:
            found = found - self._mean
        if self._deviation is not None:
            found = found / self._deviation
        return found.astype(np.float32)

    def _emphasized(self, frames: Floats) -> Floats:
        """Frames [F, N + 1] -> [F, N]: high frequencies are raised, by subtracting a share of the sample before."""
        if not self._emphasis:
            return frames[:, :-1]
        if not self._is_htk:
            return frames[:, 1:] - self._emphasis * frames[:, :-1]
        first = frames[:, :1] * (1.0 - self._emphasis)
        return np.concatenate([first, frames[:, 1:-1] - self._emphasis * frames[:, :-2]], axis=-1)

    @cached_property
    def _bands(self) -> NDArray[np.float64]:
        """HTK's triangular filters [fft / 2 + 1, B], with a height of 1."""
        first, last = (2595.0 * math.log10(1.0 + each / 700.0) for each in self._range)
        edges = 700.0 * (10 ** (np.linspace(first, last, self.num_bands + 2) / 2595.0) - 1.0)
        slopes = edges[None] - (np.arange(self._fft // 2 + 1) * (RATE / self._fft))[:, None]
        widths = edges[1:] - edges[:-1]
        down, up = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
        bands: NDArray[np.float64] = np.maximum(0.0, np.minimum(down, up))
        return bands


def filled(num_samples: int) -> int:
    """Return the length of a sound with the silence behind it."""
    return -(-num_samples // _FILLED_TO) * _FILLED_TO


class Gemma3nSpectrogram(Spectrogram):
    """Gemma 3n's."""

    usual: ClassVar[Mapping[str, Any]] = {
        "frame_length_ms": 32.0,
        "min_frequency": 125.0,
        "max_frequency": 7600.0,
        "preemphasis": 0.97,
        "fft_overdrive": True,
        "mel_floor": 1e-5,
    }

    @cached_property
    def window(self) -> NDArray[np.float32]:
        turns = 2 * np.pi * np.arange(self.frame, dtype=np.float32) / self.frame
        window: NDArray[np.float32] = (0.5 * (1 - np.cos(turns))).astype(np.float32)
        return window

    def floored(self, magnitudes: Floats) -> Floats:
        return np.maximum(magnitudes, self.floor)


class Gemma4Spectrogram(Spectrogram):
    """Gemma 4's."""

    usual: ClassVar[Mapping[str, Any]] = {
        "frame_length_ms": 20.0,
        "min_frequency": 0.0,
        "max_frequency": 8000.0,
        "preemphasis": 0.0,
        "fft_overdrive": False,
        "mel_floor": 1e-3,
    }

    @property
    def before(self) -> int:
        return self.frame // 2

    @cached_property
    def window(self) -> NDArray[np.float32]:
        return np.hanning(self.frame + 1)[:-1].astype(np.float32)

    def floored(self, magnitudes: Floats) -> Floats:
        return magnitudes + self.floor


class UsmSounds(SoundProcessor):
    """Base of both families' processors: tokens around a sound, and its spectrogram [1, F, B]."""

    kind: type[Spectrogram]
    usual_tokens: tuple[str, str, str]
    """Token before a sound, that of an embedding, and token behind it, where files do not name them."""
    lines = ""
    """Line breaks around a sound."""

    def __init__(self, model_dir: Path) -> None:
        self.spectrogram = self.kind(extractor_options(model_dir))
        names = zip(("boa_token", "audio_token", "eoa_token"), self.usual_tokens, strict=True)
        self.literals = tuple(token_of(model_dir, name, usual) for name, usual in names)
        self.placeholder = self.marker = self.literals[1]
        self._text = f"{self.lines}{''.join(self.literals)}{self.lines}"
        self.build(
            read_json_object(model_dir / "config.json"), optional_json_object(model_dir / PROCESSOR_FILE)
        )

    @abc.abstractmethod
    def build(self, config: JsonObject, processor: JsonObject) -> None:
        """Set `longest_s`, and what `count` needs; raises UnsupportedModelError if the files do not fit."""

    @abc.abstractmethod
    def num_valid(self, num_samples: int) -> int:
        """Return the frames of a sound that count."""

    @abc.abstractmethod
    def count(self, num_frames: int) -> int:
        """Return the embeddings of a sound, by the frames that count."""

    def prepare(self, samples: Samples) -> Prepared:
        num_frames = self.num_valid(len(samples))
        if not num_frames:
            raise ValidationError(
                f"the sound has {len(samples)} samples at 16 kHz, and this model takes at least {self._least}"
            )
        features = self.spectrogram.compute(samples)[None, :num_frames]
        run = Placeholders(((self.placeholder, self.count(num_frames)),))
        return Prepared({FEATURES: np.ascontiguousarray(features)}, self._text, (run,))

    @cached_property
    def _least(self) -> int:
        """Samples of the shortest sound."""
        return next(size for size in range(1, self.spectrogram.frame + 2) if self.num_valid(size))


class Gemma3nSounds(UsmSounds):
    """Gemma 3n: every sound takes the same number of embeddings."""

    kind = Gemma3nSpectrogram
    usual_tokens = ("<start_of_audio>", "<audio_soft_token>", "<end_of_audio>")
    lines = "\n\n"

    def build(self, config: JsonObject, processor: JsonObject) -> None:
        self._count = config.integer("audio_soft_tokens_per_image", 188, high=_MAX_TOKENS)
        if processor.integer("audio_seq_length", self._count) != self._count:
            raise processor.unsupported(
                "audio_seq_length", f"{self._count}, config.json's audio_soft_tokens_per_image"
            )
        encoder = config.child("audio_config")
        if encoder.integer("input_feat_size", 128) != self.spectrogram.num_bands:
            raise encoder.unsupported(
                "input_feat_size", f"{self.spectrogram.num_bands}, as the extractor has"
            )
        strides = math.prod(along for along, _ in pairs_of(encoder, "sscp_conv_stride_size", STRIDES))
        joined = strides * encoder.integer("conf_reduction_factor", 4)
        self.longest_s = min(LONGEST_S, self._count * joined * HOP / RATE)

    def num_valid(self, num_samples: int) -> int:
        return self.spectrogram.num_frames(filled(num_samples))

    def count(self, num_frames: int) -> int:
        return self._count


class Gemma4Sounds(UsmSounds):
    """Gemma 4: an embedding is 40 ms."""

    kind = Gemma4Spectrogram
    usual_tokens = ("<|audio>", "<|audio|>", "<audio|>")
    frames_each = 4

    def build(self, config: JsonObject, processor: JsonObject) -> None:
        first, _ = channels_of(config.child("audio_config"), CHANNELS_KEY)
        bands = self.spectrogram.num_bands
        if bands != first // 4 * 4:
            raise config.unsupported("audio_config", f"of an encoder of {bands} bands, as the extractor has")
        most = processor.integer("audio_seq_length", 750, high=_MAX_TOKENS)
        self.longest_s = min(LONGEST_S, most * self.frames_each * HOP / RATE)

    def num_valid(self, num_samples: int) -> int:
        return self.spectrogram.num_frames(num_samples)

    def count(self, num_frames: int) -> int:
        return -(-num_frames // self.frames_each)
