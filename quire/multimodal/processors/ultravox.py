# SPDX-License-Identifier: Apache-2.0
"""Ultravox (Fixie AI, 2024): sounds of any length, of whose encoder's rows eight become one embedding.

The numbers are those of the processor in its repository (fixie-ai/ultravox, `ultravox_processing.py` of 0.5). It pads
the sounds of a prompt to the longest one; here each is processed as if it were alone.
"""

from __future__ import annotations

import math
from pathlib import Path

from quire.models.json_object import JsonObject, read_json_object
from quire.multimodal.processors.base import Prepared
from quire.multimodal.processors.sound import FEATURES, LONGEST_S, HearingProcessor, WhisperSounds
from quire.speech.features import HOP, Samples, log_mel

LEAST_FRAMES = 2  # A shorter sound is followed by silence.
_MAX_STACK = 256


def stack_of(whole: JsonObject) -> int:
    """Return how many rows of the encoder become one embedding."""
    return whole.integer("stack_factor", 8, high=_MAX_STACK)


def embeddings_of_frames(num_frames: int, stack: int) -> int:
    """Return the embeddings of the frames of one window, two of which are a row of the encoder."""
    return math.ceil(num_frames / (2 * stack))


class UltravoxSounds(WhisperSounds):
    """As many windows as the sound needs; the last one ends with the sound."""

    usual_token = "<|audio|>"
    stands_as_end = True

    def __init__(self, model_dir: Path) -> None:
        self._stack = stack_of(read_json_object(model_dir / "config.json"))
        super().__init__(model_dir)

    def build(self, encoder: JsonObject) -> None:
        self.literals = (self.placeholder,)
        self.longest_s = LONGEST_S

    def prepare(self, samples: Samples) -> Prepared:
        num_frames = max(math.ceil(len(samples) / HOP), LEAST_FRAMES)
        windows = range(0, num_frames, self._num_frames)
        count = sum(
            embeddings_of_frames(min(num_frames - first, self._num_frames), self._stack) for first in windows
        )
        features = log_mel(samples, self._bins, num_frames)
        return self._prepared({FEATURES: features[None]}, ((self.placeholder, count),))


class UltravoxProcessor(HearingProcessor):
    """Ultravox."""

    kind = UltravoxSounds
