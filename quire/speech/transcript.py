# SPDX-License-Identifier: Apache-2.0
"""Segments of a transcript, from the tokens of windows with timestamps.

Invariant: segments are in order of time and lie within the sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.speech.requests import Attempt
from quire.speech.vocabulary import TIMESTAMP_S, SpeechVocabulary
from quire.speech.words import Word, words_of

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
        words: with their times, if they were wanted.
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
    words: list[Word] = field(default_factory=list)


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


def words_in(segments: Iterable[Segment]) -> list[Word]:
    """Return the words of segments, in order."""
    return [word for segment in segments for word in segment.words]


def joined(segments: Iterable[Segment], growing: str = "") -> str:
    """Return the text of segments, and of the one that is growing behind them."""
    return ("".join(segment.text for segment in segments) + growing).strip()


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


class _Piece(NamedTuple):
    """Tokens between two timestamps, in seconds of the window; None: there is no timestamp."""

    start: float | None
    end: float | None
    first: int
    """Index of the piece's first token in the window's."""
    tokens: list[int]


@dataclass(frozen=True)
class Pieces:
    """Division of a window's tokens into segments.

    Args:
        start, end: of the window, in seconds of the sound. A segment without a closing timestamp ends with it.
        language: code.
    """

    words: SpeechVocabulary
    start: float
    end: float
    language: str
    decode: Decode

    def segments(
        self, attempt: Attempt, times: Sequence[float] | None, no_speech_prob: float | None = None
    ) -> list[Segment]:
        """Return the segments, those without text left out.

        Args:
            times: start of each token, in seconds of the window; None: words are not wanted.
        """
        pieces = _pieces(self.words, attempt.tokens)
        found = (self._segment(one, attempt, times, no_speech_prob) for one in pieces)
        return [one for one in found if one is not None]

    def _segment(
        self,
        piece: _Piece,
        attempt: Attempt,
        times: Sequence[float] | None,
        no_speech_prob: float | None,
    ) -> Segment | None:
        text = self.decode([token for token in piece.tokens if token < self.words.end])
        begins = min(self.start + (0.0 if piece.start is None else piece.start), self.end)
        ends = self.end if piece.end is None else min(self.start + piece.end, self.end)
        if not text.strip() or begins > ends:
            return None
        return Segment(
            round(begins, 3),
            round(ends, 3),
            text,
            piece.tokens,
            attempt.temperature,
            attempt.avg_logprob,
            attempt.compression_ratio,
            round(self.start, 3),
            no_speech_prob,
            [] if times is None else self._words(piece, times),
        )

    def _words(self, piece: _Piece, times: Sequence[float]) -> list[Word]:
        """Return the words of a piece; a token lasts until the next one begins."""
        text = [at for at, token in enumerate(piece.tokens) if token < self.words.end]
        places = [piece.first + at for at in text]
        spans = [(self._time(times[at]), self._time(times[min(at + 1, len(times) - 1)])) for at in places]
        return words_of([piece.tokens[at] for at in text], spans, self.language, self.decode)

    def _time(self, seconds: float) -> float:
        return round(min(self.start + seconds, self.end), 3)


def _pieces(words: SpeechVocabulary, tokens: list[int]) -> Iterator[_Piece]:
    """Yield the pieces with text."""
    piece: list[int] = []
    start: float | None = None
    has_text = False
    for at, token in enumerate(tokens):
        piece.append(token)
        if token < words.first_timestamp:
            has_text = True
            continue
        time = (token - words.first_timestamp) * TIMESTAMP_S
        if has_text:
            yield _Piece(start, time, at + 1 - len(piece), piece)
            piece, has_text = [], False
        else:
            piece = [token]
        start = time
    if has_text:
        yield _Piece(start, None, len(tokens) - len(piece), piece)
