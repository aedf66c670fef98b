# SPDX-License-Identifier: Apache-2.0
"""Requests of one window: its audio, the decoder's prompt, the sampling parameters, and what an output says.

Invariant: all requests of a window have the same first positions and the same digest, so that its encoder's output is
computed once and shared by the prefix cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import EngineError, ValidationError
from quire.inputs import TokensPrompt
from quire.media import MediaItem
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams, RequestOutputKind, SamplingParams
from quire.speech.alignment import Alignment
from quire.speech.features import HOP
from quire.speech.rules import rule_args, sink_of
from quire.speech.vocabulary import SpeechVocabulary

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION_RATIO = 2.4
MIN_AVG_LOGPROB = -1.0
SILENCE_PROB = 0.6
DEFAULT_SEED = 0

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class SpeechOptions:
    """Options of a transcription.

    Args:
        language: code; None: detected.
        task: "transcribe", or "translate" to English.
        prompt: text that precedes the sound, for its names and style.
        hotwords: words that are likely in it, put before the prompt.
        temperatures: tried in order until a text is neither repetitive nor unlikely.
        timestamps: whether segments with times are wanted; else a window is one segment.
        no_speech: whether the probability of silence is wanted for every window.
        seed: of temperatures above 0.
        max_tokens: most tokens of a window; None fills the context.
        words: whether words with times are wanted.
        vad_filter: whether only windows with a voice are transcribed.
        is_live: whether texts are wanted while they grow; then no second temperature is tried.
        beam_size: beams of a search at temperature 0, whose text is wanted; 1: none.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str = ""
    hotwords: str = ""
    temperatures: tuple[float, ...] = FALLBACK_TEMPERATURES
    timestamps: bool = False
    no_speech: bool = False
    seed: int | None = None
    max_tokens: int | None = None
    words: bool = False
    vad_filter: bool = False
    is_live: bool = False
    beam_size: int = 1

    def searches(self, temperature: float) -> bool:
        """Return whether texts at this temperature come from a beam search."""
        return self.beam_size > 1 and temperature == 0.0


@dataclass(frozen=True)
class WindowAudio:
    """Features of a window: digest of its samples and the file with `input_features`; `leases` keep the file."""

    digest: bytes
    path: str
    leases: Sequence[object] = field(default=(), repr=False)


@dataclass(frozen=True)
class Ask:
    """One request to the engine.

    Args:
        is_live: whether its outputs are cumulative, and their texts final as far as they go.
    """

    prompt: TokensPrompt
    params: SamplingParams | BeamSearchParams
    is_live: bool = False


@dataclass(frozen=True)
class TimesAsk:
    """Call of the engine for the times of a window's tokens; `audio` keeps the file of `item`."""

    alignment: Alignment
    item: MediaItem
    audio: WindowAudio


def check_beam_size(given: object) -> None:
    """Raise ValidationError unless it is a number of beams."""
    if type(given) is not int or not 1 <= given <= MAX_BEAM_WIDTH:
        raise ValidationError(
            f"beam_size must be an integer in [1, {MAX_BEAM_WIDTH}], got {given!r:.40}", param="beam_size"
        )


def item_of(words: SpeechVocabulary, audio: WindowAudio) -> MediaItem:
    """Return the item whose embeddings are the encoder's output."""
    size = words.num_encoded
    return MediaItem(audio.digest, "audio", 0, size, [(0, words.num_frames // 2)], audio.path)


def prompt_of(words: SpeechVocabulary, audio: WindowAudio, decoder_ids: Sequence[int]) -> TokensPrompt:
    """Return the prompt: positions of the encoder's output, then the decoder's ids."""
    ids = [*[words.end] * words.num_encoded, *decoder_ids]
    return TokensPrompt(prompt_token_ids=ids, media=[item_of(words, audio)], leases=list(audio.leases))


def times_request(
    words: SpeechVocabulary, audio: WindowAudio, ids: Sequence[int], tokens: Sequence[int], num_samples: int
) -> TimesAsk:
    """Return the call for the times of a window's tokens behind the decoder's prompt `ids`."""
    alignment = Alignment(
        list(ids), list(tokens), num_samples // HOP, list(words.alignment_heads), words.median_width
    )
    return TimesAsk(alignment, item_of(words, audio), audio)


def previous_ids(words: SpeechVocabulary, encode: Encode, prompt: str) -> list[int]:
    """Return the tokens of a prompt before the transcript: its end, at most half of the context.

    Raises:
        ValidationError: the prompt has special tokens.
    """
    if not prompt.strip():
        return []
    ids = list(encode(" " + prompt.strip()))
    if any(token >= words.end for token in ids):
        raise ValidationError("prompt has a special token of the model; write it otherwise", param="prompt")
    return [words.previous, *ids[-(words.context // 2 - 1) :]]


def decoder_ids(
    words: SpeechVocabulary, options: SpeechOptions, language: str, previous: Sequence[int]
) -> list[int]:
    """Return the decoder's prompt."""
    ids = [*previous, words.start]
    if words.languages:
        ids += [words.languages[language], words.tasks[options.task]]
    return ids if options.timestamps else [*ids, words.no_timestamps]


def text_request(
    words: SpeechVocabulary,
    options: SpeechOptions,
    audio: WindowAudio,
    ids: Sequence[int],
    temperature: float,
    *,
    is_live: bool = False,
) -> Ask:
    """Return the request for a window's text."""
    room = words.context - len(ids)
    max_tokens = room if options.max_tokens is None else max(1, min(options.max_tokens, room))
    if options.searches(temperature):
        return Ask(prompt_of(words, audio, ids), _search(words, options, max_tokens))
    params = SamplingParams(
        temperature=temperature,
        seed=DEFAULT_SEED if options.seed is None else options.seed,
        max_tokens=max_tokens,
        logprobs=0,
        detokenize=False,
        extra_args=rule_args(timestamps=options.timestamps),
        output_kind=RequestOutputKind.CUMULATIVE if is_live else RequestOutputKind.FINAL_ONLY,
    )
    return Ask(prompt_of(words, audio, ids), params, is_live)


def _search(words: SpeechVocabulary, options: SpeechOptions, max_tokens: int) -> BeamSearchParams:
    """Return the parameters of a beam search, equal to that of transformers."""
    return BeamSearchParams(
        beam_width=options.beam_size,
        max_tokens=max_tokens,
        banned_token_ids=(sink_of(words, timestamps=options.timestamps),),
        extra_args=rule_args(timestamps=options.timestamps, keeps_mass=True),
    )


def language_request(words: SpeechVocabulary, audio: WindowAudio) -> Ask:
    """Return the request whose one token is the language's."""
    return _first_token(words, audio, [words.start], allowed_token_ids=tuple(words.languages.values()))


def silence_request(words: SpeechVocabulary, audio: WindowAudio, previous: Sequence[int]) -> Ask:
    """Return the request whose one position has the logprob of silence."""
    return _first_token(words, audio, [*previous, words.start], logprob_token_ids=(words.no_speech,))


def _first_token(words: SpeechVocabulary, audio: WindowAudio, ids: Sequence[int], **more: Any) -> Ask:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **more,
    )
    return Ask(prompt_of(words, audio, ids), params)


def completion_of(output: RequestOutput) -> CompletionOutput:
    """Return an output's completion, of several beams the best.

    Raises:
        EngineError: the request failed; ValidationError: it was refused.
    """
    completion = output.outputs[0]
    if completion.finish_reason in ("error", "abort", "timeout"):
        reason = f"the audio could not be transcribed ({completion.finish_reason}): {completion.stop_reason}"
        raise ValidationError(reason, param="file") if completion.refused else EngineError(reason)
    return completion


@dataclass(frozen=True)
class Attempt:
    """A window's tokens at one temperature, the end of text excluded."""

    tokens: list[int]
    text: str
    temperature: float
    avg_logprob: float

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over its compressed bytes; above 2.4 it repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    @property
    def is_good(self) -> bool:
        """True if no other temperature need be tried."""
        return not self.is_unlikely and self.compression_ratio <= MAX_COMPRESSION_RATIO

    @property
    def is_unlikely(self) -> bool:
        return self.avg_logprob < MIN_AVG_LOGPROB


def read_attempt(
    words: SpeechVocabulary, output: RequestOutput, temperature: float, decode: Callable[[list[int]], str]
) -> Attempt:
    """Return what an output says. Raises as `completion_of`."""
    completion = completion_of(output)
    tokens = [token for token in completion.token_ids if token != words.end]
    total = completion.cumulative_logprob or 0.0
    text = decode([token for token in tokens if token < words.end])
    return Attempt(tokens, text, temperature, total / (len(tokens) + 1))


def first_logprob(output: RequestOutput, token: int) -> float:
    """Return the logprob of a token at an output's first position. Raises as `completion_of`."""
    logprobs = completion_of(output).logprobs
    assert logprobs, "the request asks for logprobs"
    return logprobs[0][token].logprob
