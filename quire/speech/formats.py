# SPDX-License-Identifier: Apache-2.0
"""Forms of a transcript: subtitles, and the replies and stream events of OpenAI's API and of vLLM's.

Invariant: the deltas of a stream concatenate to the text of its last event, which is that of the same request without
stream unless the latter tries a second temperature.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from quire.speech.languages import LANGUAGES
from quire.speech.transcript import Segment, Transcription, words_in


class DurationUsage(msgspec.Struct, kw_only=True):
    """Usage in seconds of sound, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct, kw_only=True):
    """Usage in tokens; those of the input are positions of the encoder's output and of the prompt."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class TranscriptReply(msgspec.Struct, kw_only=True):
    """Reply of `response_format` json."""

    text: str
    usage: DurationUsage
    ignored: list[str] | UnsetType = UNSET


class SegmentReply(msgspec.Struct):
    """Segment of verbose_json; `seek` is the start of its window, in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordReply(msgspec.Struct):
    """Word of verbose_json, without spaces around it."""

    word: str
    start: float
    end: float


class VerboseReply(msgspec.Struct, kw_only=True):
    """Reply of `response_format` verbose_json; without `words` unless they were wanted."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[SegmentReply]
    usage: DurationUsage
    words: list[WordReply] | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET


class TranscriptDelta(msgspec.Struct, kw_only=True):
    """Event with the next part of a transcript."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TranscriptDone(msgspec.Struct, kw_only=True):
    """Last event of a transcript."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokenUsage


class ChunkDelta(msgspec.Struct):
    content: str


class ChunkChoice(msgspec.Struct):
    delta: ChunkDelta
    finish_reason: str | None = None


class TranscriptChunk(msgspec.Struct, kw_only=True):
    """Chunk of a stream in vLLM's form."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"] = "transcription.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]


def usage_seconds(transcription: Transcription) -> DurationUsage:
    """Return the usage in seconds."""
    return DurationUsage(seconds=math.ceil(transcription.duration))


def usage_tokens(transcription: Transcription) -> TokenUsage:
    """Return the usage in tokens."""
    given = transcription.num_audio_tokens + transcription.num_prompt_tokens
    details = InputTokenDetails(transcription.num_audio_tokens, transcription.num_prompt_tokens)
    total = given + transcription.num_tokens
    return TokenUsage(
        input_tokens=given,
        output_tokens=transcription.num_tokens,
        total_tokens=total,
        input_token_details=details,
    )


def verbose(transcription: Transcription, *, segments: bool = True, words: bool = False) -> VerboseReply:
    """Return a transcript with its segments and words, each if wanted."""
    found = words_in(transcription.segments)
    return VerboseReply(
        task=transcription.task,
        language=LANGUAGES.get(transcription.language, transcription.language),
        duration=transcription.duration,
        text=transcription.text,
        segments=[_segment(*each) for each in enumerate(transcription.segments)] if segments else [],
        words=[WordReply(one.text.strip(), one.start, one.end) for one in found] if words else UNSET,
        usage=usage_seconds(transcription),
    )


def _segment(number: int, segment: Segment) -> SegmentReply:
    return SegmentReply(
        id=number,
        seek=round(100 * segment.window_start),
        start=segment.start,
        end=segment.end,
        text=segment.text,
        tokens=segment.tokens,
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob or 0.0,
    )


class Cue(NamedTuple):
    """Line of subtitles."""

    start: float
    end: float
    text: str


def cues(transcription: Transcription, *, words: bool = False) -> list[Cue]:
    """Return a line for each segment, or for each word."""
    parts = words_in(transcription.segments) if words else transcription.segments
    return [Cue(one.start, one.end, _line(one.text)) for one in parts]


def srt(transcription: Transcription, *, words: bool = False) -> str:
    """Return subtitles in SubRip's form, a line for each segment or for each word."""
    return "".join(
        f"{number}\n{_clock(one.start, ',', hours=True)} --> {_clock(one.end, ',', hours=True)}\n{one.text}\n\n"
        for number, one in enumerate(cues(transcription, words=words), start=1)
    )


def vtt(transcription: Transcription, *, words: bool = False) -> str:
    """Return subtitles in WebVTT's form, as `srt`."""
    lines = (
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_escaped(one.text)}\n\n"
        for one in cues(transcription, words=words)
    )
    return "WEBVTT\n\n" + "".join(lines)


def _line(text: str) -> str:
    """Return a text as one line without the arrow that separates times."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, mark: str, *, hours: bool = False) -> str:
    """Return a time with milliseconds; hours only where there are some, or if asked."""
    total = round(seconds * 1000)
    whole, thousandths = divmod(total, 1000)
    minutes, rest = divmod(whole, 60)
    above, minutes = divmod(minutes, 60)
    front = f"{above:02}:" if hours or above else ""
    return f"{front}{minutes:02}:{rest:02}{mark}{thousandths:03}"


def plain(transcription: Transcription, *, words: bool = False) -> str:
    """Return the text with a line break at its end."""
    return transcription.text + "\n"


def as_json(transcription: Transcription, *, words: bool = False) -> str:
    """Return verbose_json as text."""
    found: Any = msgspec.to_builtins(verbose(transcription, words=words))
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"


WRITERS = {"text": plain, "srt": srt, "vtt": vtt, "json": as_json}
"""Form of a file -> function that returns its content."""
