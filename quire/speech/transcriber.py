# SPDX-License-Identifier: Apache-2.0
"""Transcription of one window: which requests it takes, written without any I/O.

A job is a generator that yields requests and is sent their outputs. So `LLM`, which computes many jobs in rounds, and
the server, which awaits each request, run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.outputs import RequestOutput
from quire.speech.requests import (
    MIN_AVG_LOGPROB,
    SILENCE_PROB,
    Ask,
    Attempt,
    Encode,
    SpeechOptions,
    TimesAsk,
    WindowAudio,
    completion_of,
    decoder_ids,
    first_logprob,
    language_request,
    previous_ids,
    read_attempt,
    silence_request,
    text_request,
    times_request,
)
from quire.speech.transcript import Pieces, WindowText
from quire.speech.vocabulary import SpeechVocabulary
from quire.speech.windows import Window

T = TypeVar("T")
Job = Generator[Ask | TimesAsk, Any, T]
"""Is sent a `RequestOutput` for each `Ask`, the tokens' times in seconds of the window for each `TimesAsk`."""


@dataclass(frozen=True)
class Transcriber:
    """Jobs of one sound.

    Args:
        encode, decode: of the tokenizer, without special tokens.
    """

    words: SpeechVocabulary
    options: SpeechOptions
    encode: Encode
    decode: Callable[[list[int]], str]

    def previous(self) -> list[int]:
        """Return the tokens of the prompt. Raises ValidationError."""
        return previous_ids(self.words, self.encode, f"{self.options.hotwords} {self.options.prompt}")

    def detect_language(self, audio: WindowAudio) -> Job[str]:
        """Return the likeliest language of a window."""
        output = yield language_request(self.words, audio)
        (token,) = completion_of(output).token_ids
        return self.words.language_of[token]

    def window(
        self, audio: WindowAudio, window: Window, language: str, previous: Sequence[int]
    ) -> Job[WindowText]:
        """Return a window's segments: none if it is silent."""
        ids = decoder_ids(self.words, self.options, language, previous)
        options = self.options
        silence: float | None = None
        if options.no_speech or options.is_live:
            silence = yield from self._silence(audio, previous)
        is_live = options.is_live and silence is not None and silence <= SILENCE_PROB
        num_tokens, attempts = 0, list[Attempt]()
        for temperature in options.temperatures[: 1 if options.is_live else None]:
            grows = is_live and not options.searches(temperature)
            output = yield text_request(self.words, options, audio, ids, temperature, is_live=grows)
            attempt = read_attempt(self.words, output, temperature, self.decode)
            num_tokens += len(attempt.tokens)
            attempts.append(attempt)
            if attempt.is_good:
                break
            if attempt.avg_logprob < MIN_AVG_LOGPROB:
                silence = (yield from self._silence(audio, previous)) if silence is None else silence
                if silence > SILENCE_PROB:
                    return WindowText([], len(ids), num_tokens)
        best = attempts[-1]
        times = None
        if self.options.words and best.text.strip():
            times = yield times_request(self.words, audio, ids, best.tokens, window.end - window.start)
        pieces = Pieces(self.words, window.start_s, window.end_s, language, self.decode)
        found = pieces.segments(best, times, no_speech_prob=silence)
        return WindowText(found, len(ids), num_tokens)

    def text_so_far(self, output: RequestOutput) -> str:
        """Return the text of a live request's output that further tokens only add to."""
        (completion,) = output.outputs
        text = self.decode([token for token in completion.token_ids if token < self.words.end])
        return text.rstrip("\ufffd").rstrip()

    def _silence(self, audio: WindowAudio, previous: Sequence[int]) -> Job[float]:
        output = yield silence_request(self.words, audio, previous)
        return math.exp(first_logprob(output, self.words.no_speech))
