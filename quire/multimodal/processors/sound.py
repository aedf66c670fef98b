# SPDX-License-Identifier: Apache-2.0
"""Processors of sounds: samples in, a log-mel spectrogram and the layout of its placeholders out.

Invariant: spectrograms have the bits of transformers' extractors, here of WhisperFeatureExtractor, placeholders the
numbers of its processors. A sound that is longer than a model takes is an error; transformers drops the rest of it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, ValidationError
from quire.models.json_object import JsonObject, optional_json_object, read_json_object
from quire.multimodal.processors.base import OPTIONS_FIELD, Arrays, Placeholders, Prepared, Processor
from quire.multimodal.processors.files import IMAGE_FILE, PROCESSOR_FILE, token_of
from quire.speech.features import FFT, HOP, RATE, Samples, log_mel

FEATURES, FRAMES = "input_features", "num_frames"
EXTRACTOR = "feature_extractor"
LONGEST_S = 2400.0  # Of a sound in several windows.
_FRAMES_AFTER = 2  # Frames after a sound's end that the convolutions see from its last row.
_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
_USUAL = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}


def encoder_options(whole: JsonObject) -> JsonObject:
    """Return the encoder's part of config.json with Whisper's keys, and the usual values of absent ones."""
    audio = whole.child("audio_config")
    renamed = {_KEYS[key]: value for key, value in audio.values.items() if key in _KEYS}
    return JsonObject(audio.where, {**_USUAL, **renamed, **audio.values}, refused=audio.refused)


def rows_of_frames(num_frames: int) -> tuple[int, int]:
    """Return the rows that the encoder computes of a sound shorter than a window, and how many pairs they are."""
    rows = (num_frames - 1) // 2 + 1
    return rows, rows // 2


class SoundProcessor(abc.ABC):
    """Processor of the sounds of one checkpoint.

    Attributes:
        marker: text that a chat template writes for a sound, and a user writes in a prompt; one token.
        placeholder: the token that takes an embedding.
        literals: every token that a processed sound may consist of.
        longest_s: seconds of the longest sound.
        stands_as_end: in a prompt, the token that ends a text stands for each placeholder, which the model lacks.
        heeds_images: a sound in a prompt with images has other embeddings; its arrays then have `BESIDE_IMAGES`.
    """

    OPTIONS: frozenset[str] = frozenset()
    """Options that a request may set."""
    marker: str
    placeholder: str
    literals: tuple[str, ...]
    longest_s: float
    stands_as_end = False
    heeds_images = False

    @abc.abstractmethod
    def __init__(self, model_dir: Path) -> None:
        """Read the checkpoint's files; raises StartupError if one is missing or has what is not supported."""

    @abc.abstractmethod
    def prepare(self, samples: Samples) -> Prepared:
        """Process mono samples at 16 kHz, of at most `longest_s` seconds.

        Raises:
            ValidationError: the sound is not possible for this model.
        """

    def _prepared(self, arrays: Arrays, pieces: tuple[tuple[str, int], ...]) -> Prepared:
        return Prepared(arrays, self.placeholder, (Placeholders(pieces),))


class WhisperSounds(SoundProcessor):
    """Base of processors for Whisper's encoder; its windows have 30 s."""

    usual_token: str

    def __init__(self, model_dir: Path) -> None:
        config = read_json_object(model_dir / "config.json")
        encoder, extractor = encoder_options(config), extractor_options(model_dir)
        self._bins = extractor.integer("feature_size", 80)
        self._window_s = extractor.integer("chunk_length", 30, high=600)
        self._num_frames = self._window_s * RATE // HOP
        for key, value in (("sampling_rate", RATE), ("hop_length", HOP), ("n_fft", FFT)):
            extractor.only(key, value)
        extractor.only("dither", 0, 0.0)
        extractor.only("do_normalize", False)
        self._check_sizes(encoder, extractor)
        self.placeholder = self.marker = token_of(model_dir, "audio_token", self.usual_token)
        self.build(encoder)

    def _check_sizes(self, encoder: JsonObject, extractor: JsonObject) -> None:
        rows, bins = encoder.integer("max_source_positions"), encoder.integer("num_mel_bins")
        if bins != self._bins:
            raise extractor.unsupported("feature_size", f"{bins}, as the encoder has")
        if 2 * rows != self._num_frames:
            raise extractor.unsupported("chunk_length", f"{2 * rows * HOP / RATE:g}, as the encoder takes")

    @abc.abstractmethod
    def build(self, encoder: JsonObject) -> None:
        """Set `literals` and `longest_s`."""


def extractor_options(model_dir: Path) -> JsonObject:
    """Return the options of the feature extractor. Raises ModelLoadError if no file has them."""
    processor = optional_json_object(model_dir / PROCESSOR_FILE)
    return processor.child(EXTRACTOR) if EXTRACTOR in processor else read_json_object(model_dir / IMAGE_FILE)


class Qwen2AudioSounds(WhisperSounds):
    """One window at most, of which a shorter sound takes its share of embeddings."""

    usual_token = "<|AUDIO|>"

    def build(self, encoder: JsonObject) -> None:
        self.literals = (self.placeholder,)
        self.longest_s = float(self._window_s)

    def prepare(self, samples: Samples) -> Prepared:
        num_frames = min(math.ceil(len(samples) / HOP), self._num_frames)
        _, count = rows_of_frames(num_frames)
        if count < 1:
            raise ValidationError(
                f"the sound has {len(samples)} samples at 16 kHz, and this model takes at least {2 * HOP + 1}"
            )
        features = log_mel(samples[: self._num_frames * HOP], self._bins, self._num_frames)
        own = features[None, :, : num_frames + _FRAMES_AFTER]
        frames = np.array([num_frames], dtype=np.int64)
        return self._prepared({FEATURES: own, FRAMES: frames}, ((self.placeholder, count),))


class VoxtralSounds(WhisperSounds):
    """As many windows as the sound needs, the last one filled with silence."""

    usual_token = "[AUDIO]"
    begin = "[BEGIN_AUDIO]"

    def build(self, encoder: JsonObject) -> None:
        self.literals = (self.begin, self.placeholder)
        self.longest_s = LONGEST_S
        joined = encoder.integer("encoder_ffn_dim") // encoder.integer("d_model")
        self._per_window = encoder.integer("max_source_positions") // max(joined, 1)

    def prepare(self, samples: Samples) -> Prepared:
        count = math.ceil(len(samples) / (self._num_frames * HOP))
        features = log_mel(samples, self._bins, count * self._num_frames)
        windows = features.reshape(self._bins, count, self._num_frames).transpose(1, 0, 2)
        pieces = ((self.begin, 1), (self.placeholder, count * self._per_window))
        return self._prepared({FEATURES: np.ascontiguousarray(windows)}, pieces)


class HearingProcessor(Processor):
    """Processor of a model that takes sounds and no images."""

    OPTIONS = frozenset()
    takes_images = False
    marker = placeholder = ""
    kind: type[SoundProcessor]

    def __init__(self, model_dir: Path) -> None:
        self.sounds = self.kind(model_dir)
        self.literals = self.sounds.literals

    @classmethod
    def from_files(cls, model_dir: Path, options: Mapping[str, Any]) -> Processor:
        if options:
            raise ConfigError(f"--mm-processor-kwargs has {min(options)!r}, and this model has no options")
        return cls(model_dir)

    def prepare(self, image: Any, options: Mapping[str, Any]) -> Prepared:
        raise ValidationError("this model takes no images", param=OPTIONS_FIELD)

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        return dict(arrays)


class Qwen2AudioProcessor(HearingProcessor):
    """Qwen2-Audio."""

    kind = Qwen2AudioSounds


class VoxtralProcessor(HearingProcessor):
    """Voxtral."""

    kind = VoxtralSounds
