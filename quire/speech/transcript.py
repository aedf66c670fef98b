# SPDX-License-Identifier: Apache-2.0
"""Segments of a transcript, from the tokens of windows with timestamps.

Invariant: segments are in order of time and lie within the sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.speech.requests import Attempt
from quire.speech.vocabulary import TIMESTAMP_S, SpeechVocabulary

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Segment:
    """Part of a transcript.

    Args:
        start, end: seconds from the sound's start.
        text: with its leading space.
        tokens: with timestamps.
        window_start: start of its window, in seconds.
        no_speech_prob: probability of silence in the segment's window; None: unknown.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    window_start: float = 0.0
    no_speech_prob: float | None = None


@dataclass(frozen=True)
class WindowText:
    """Result of one window: its segments; tokens of its prompt, and those sampled in all attempts."""

    segments: list[Segment]
    num_prompt_tokens: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Transcription:
    """Transcript of one sound.

    Args:
        language: code.
        duration: seconds of the sound.
        num_audio_tokens: positions of the encoder's output over all windows, each counted once.
        num_prompt_tokens: tokens of the decoder's prompts, each window's counted once.
        num_tokens: sampled tokens of all attempts.
    """

    text: str
    language: str
    duration: float
    segments: list[Segment] = field(default_factory=list)
    task: str = "transcribe"
    num_audio_tokens: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0


def joined(segments: Iterable[Segment]) -> str:
    """Return the text of segments."""
    return "".join(segment.text for segment in segments).strip()


def transcription_of(
    words: SpeechVocabulary, parts: Sequence[WindowText], language: str, task: str, seconds: float
) -> Transcription:
    """Return the transcript of a sound from the results of its windows, in order."""
    segments = [segment for part in parts for segment in part.segments]
    return Transcription(
        joined(segments),
        language,
        seconds,
        segments,
        task,
        num_audio_tokens=len(parts) * words.num_encoded,
        num_prompt_tokens=sum(part.num_prompt_tokens for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
    )


def segments_of(
    words: SpeechVocabulary,
    attempt: Attempt,
    start: float,
    end: float,
    decode: Decode,
    no_speech_prob: float | None = None,
) -> list[Segment]:
    """Return the segments of a window, those without text left out.

    Args:
        start, end: of the window, in seconds of the sound. A segment without a closing timestamp ends with it.
    """
    found = []
    for first, last, tokens in _pieces(words, attempt.tokens):
        text = decode([token for token in tokens if token < words.end])
        begins = min(start + (0.0 if first is None else first), end)
        ends = end if last is None else min(start + last, end)
        if text.strip() and begins <= ends:
            found.append(
                Segment(
                    round(begins, 3),
                    round(ends, 3),
                    text,
                    tokens,
                    attempt.temperature,
                    attempt.avg_logprob,
                    attempt.compression_ratio,
                    round(start, 3),
                    no_speech_prob,
                )
            )
    return found


def _pieces(
    words: SpeechVocabulary, tokens: list[int]
) -> Iterator[tuple[float | None, float | None, list[int]]]:
    """Yield (start, end, tokens) between timestamps, in seconds of the window; None: there is no timestamp."""
    piece: list[int] = []
    first: float | None = None
    has_text = False
    for token in tokens:
        piece.append(token)
        if token < words.first_timestamp:
            has_text = True
            continue
        time = (token - words.first_timestamp) * TIMESTAMP_S
        if has_text:
            yield first, time, piece
            piece, has_text = [], False
        else:
            piece = [token]
        first = time
    if has_text:
        yield first, None, piece
