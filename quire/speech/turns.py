# SPDX-License-Identifier: Apache-2.0
"""Turns of a live sound: its stretches with speech, found while it arrives.

A turn begins a little before the first chunk with speech, and ends when there has been none for a while. Invariant:
turns depend on the samples alone, and not on the messages in which they came; silence is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.errors import ValidationError
from quire.speech.features import RATE, Samples
from quire.speech.resampling import make_resampler
from quire.speech.voice import CHUNK, VoiceDetector

FIELD, KIND = "turn_detection", "server_vad"
HYSTERESIS = 0.15
"""Speech that has begun goes on down to so much below the threshold, as in Silero's own iterator."""


@dataclass(frozen=True)
class TurnDetection:
    """Settings of OpenAI's `server_vad`.

    Args:
        threshold: least probability of speech of a chunk that begins a turn.
        prefix_padding_ms: sound before it that belongs to the turn.
        silence_duration_ms: silence that ends a turn.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500

    def described(self) -> dict[str, Any]:
        """Return the settings as `session.update` takes them."""
        return {"type": KIND, **asdict(self)}


def read_turn_detection(given: object) -> TurnDetection | None:
    """Return the settings that a client sent; None: commits are the client's.

    Raises:
        ValidationError: the value has another form.
    """
    if given is None:
        return None
    known = {"type", "threshold", "prefix_padding_ms", "silence_duration_ms"}
    if not isinstance(given, dict) or given.get("type") != KIND or given.keys() - known:
        raise ValidationError(
            f"{FIELD} must be null or an object with type {KIND!r} and perhaps threshold, prefix_padding_ms and "
            f"silence_duration_ms, got {given!r:.80}",
            param=FIELD,
        )
    usual = TurnDetection()
    threshold = given.get("threshold", usual.threshold)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 < threshold < 1.0:
        raise ValidationError(
            f"{FIELD}.threshold must be a number above 0 and below 1, got {threshold!r:.40}", param=FIELD
        )
    times = [
        _milliseconds(given.get(name, getattr(usual, name)), name, least, most)
        for name, least, most in (("prefix_padding_ms", 0, 5000), ("silence_duration_ms", 50, 20_000))
    ]
    return TurnDetection(float(threshold), *times)


def _milliseconds(value: object, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValidationError(
            f"{FIELD}.{name} must be an integer in [{least}, {most}], got {value!r:.40}", param=FIELD
        )
    return value


class Started(NamedTuple):
    """Begin of a turn, in milliseconds of the session's sound."""

    at_ms: int


class TurnStopped(NamedTuple):
    """End of a turn."""

    at_ms: int


class Speech(NamedTuple):
    """Samples of a turn at 16 kHz."""

    samples: Samples


TurnEvent = Started | TurnStopped | Speech


class Turns:
    """Detection of turns in one session.

    Args:
        rate: samples per second that the client sends.
        num_samples: at 16 kHz, that came before.
    """

    def __init__(
        self, detector: VoiceDetector, settings: TurnDetection, rate: int, num_samples: int = 0
    ) -> None:
        self._voice = detector.stream()
        self._settings = settings
        self._resampler = make_resampler(rate, RATE)
        self._rest = np.empty(0, dtype=np.float32)
        self._before = np.empty(0, dtype=np.float32)
        self.num_samples = num_samples
        self._silence = 0
        self.is_open = False
        """True within a turn."""

    def feed(self, samples: Samples) -> list[TurnEvent]:
        """Return what happened in some more samples [T]; parts of a chunk wait for the next ones."""
        arrived = np.concatenate([self._rest, self._resampler.feed(samples)])
        count = len(arrived) // CHUNK * CHUNK
        self._rest = arrived[count:]
        chunks = np.split(arrived[:count], count // CHUNK) if count else []
        return _joined(event for chunk in chunks for event in self._chunk(chunk))

    def finish(self) -> list[TurnEvent]:
        """Return the end of an open turn, with the samples that waited."""
        last = [self._rest, self._resampler.finish()]
        self._rest = np.empty(0, dtype=np.float32)
        if not self.is_open:
            return []
        samples = np.concatenate(last)
        self.num_samples += len(samples)
        self.is_open = False
        return [Speech(samples), TurnStopped(_ms(self.num_samples))]

    def _chunk(self, chunk: Samples) -> Iterator[TurnEvent]:
        settings, probability = self._settings, self._voice.feed(chunk)
        start = self.num_samples
        self.num_samples += len(chunk)
        if not self.is_open:
            if probability < settings.threshold:
                wanted = settings.prefix_padding_ms * RATE // 1000
                before = np.concatenate([self._before, chunk])
                self._before = before[max(len(before) - wanted, 0) :]
                return
            self.is_open, self._silence = True, 0
            yield Started(_ms(start - len(self._before)))
            yield Speech(self._before)
            self._before = np.empty(0, dtype=np.float32)
        is_silent = probability < max(settings.threshold - HYSTERESIS, 0.01)
        self._silence = self._silence + len(chunk) if is_silent else 0
        yield Speech(chunk)
        if self._silence * 1000 >= settings.silence_duration_ms * RATE:
            self.is_open = False
            yield TurnStopped(_ms(self.num_samples))


def _joined(events: Iterator[TurnEvent]) -> list[TurnEvent]:
    """Return events with neighboring samples in one."""
    found: list[TurnEvent] = []
    samples: list[Samples] = []
    for event in events:
        if isinstance(event, Speech):
            samples.append(event.samples)
            continue
        if samples:
            found.append(Speech(np.concatenate(samples)))
            samples = []
        found.append(event)
    return [*found, Speech(np.concatenate(samples))] if samples else found


def _ms(num_samples: int) -> int:
    return num_samples * 1000 // RATE
