# SPDX-License-Identifier: Apache-2.0
"""Requests of a window, with a scripted engine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import EngineError, ValidationError
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.speech.formats import srt, vtt
from quire.speech.requests import SpeechOptions, TimesAsk, WindowAudio
from quire.speech.transcriber import Job, Transcriber
from quire.speech.transcript import transcription_of
from quire.speech.windows import Window
from tests.speech.test_rules import WORDS

MANY = replace(WORDS, languages={"en": 15, "de": 16}, tasks={"transcribe": 17, "translate": 18})
AUDIO, WINDOW = WindowAudio(b"\0" * 32, "/features"), Window(16_000, 32_000)
T0 = WORDS.first_timestamp


def output(tokens: Sequence[int], total: float = -0.1, reason: str = "stop", **more: Any) -> RequestOutput:
    logprobs = [{token: Logprob(total)} for token in tokens]
    completion = CompletionOutput(0, "", list(tokens), total, logprobs, finish_reason=reason, **more)
    return RequestOutput("0", None, [], [completion], True)


def silence(probability: float) -> RequestOutput:
    completion = CompletionOutput(
        0,
        "",
        [1],
        0.0,
        [{1: Logprob(0.0), WORDS.no_speech: Logprob(math.log(probability))}],
        finish_reason="length",
    )
    return RequestOutput("0", None, [], [completion], True)


def transcriber(vocabulary: Any = WORDS, /, **options: Any) -> Transcriber:
    return Transcriber(
        vocabulary,
        SpeechOptions(**options),
        lambda text: [ord(char) % 10 for char in text],
        lambda tokens: "".join(f" w{token}" for token in tokens),
    )


def run(job: Job[Any], outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    asks, left = [next(job)], list(outputs)
    while True:
        try:
            asks.append(job.send(left.pop(0)))
        except StopIteration as end:
            assert not left
            return end.value, asks


def test_window_with_timestamps_gives_segments() -> None:
    tokens = [T0, 1, 2, T0 + 10, T0 + 12, 3, T0 + 30, T0 + 30, 4, WORDS.end]
    found, (ask,) = run(transcriber(timestamps=True).window(AUDIO, WINDOW, "en", []), [output(tokens)])
    assert [(one.start, one.end, one.text) for one in found.segments] == [
        (1.0, 1.2, " w1 w2"),
        (1.24, 1.6, " w3"),
        (1.6, 2.0, " w4"),
    ]
    assert ask.prompt["prompt_token_ids"][WORDS.num_encoded :] == [WORDS.start]
    assert ask.params.extra_args == {"speech": {"timestamps": True, "keeps_mass": False}}


def test_window_with_words_asks_for_times_once() -> None:
    tokens = [T0, 1, 2, T0 + 10, T0 + 12, 3, T0 + 30, WORDS.end]
    times = [0.0, 0.02, 0.1, 0.2, 0.24, 0.3, 0.58]
    job = transcriber(timestamps=True, words=True).window(AUDIO, WINDOW, "en", [])
    found, (_, ask) = run(job, [output(tokens), times])
    assert isinstance(ask, TimesAsk)
    assert (ask.alignment.prompt, ask.alignment.tokens) == ([WORDS.start], tokens[:-1])
    assert ask.alignment.num_frames == 100
    words = [[(one.text, one.start, one.end) for one in part.words] for part in found.segments]
    assert words == [[(" w1", 1.02, 1.1), (" w2", 1.1, 1.2)], [(" w3", 1.3, 1.58)]]


def test_window_multilingual_prompt_names_language_and_task() -> None:
    job = transcriber(MANY, task="translate").window(AUDIO, WINDOW, "de", [WORDS.previous, 7])
    _, (ask,) = run(job, [output([1, WORDS.end])])
    assert ask.prompt["prompt_token_ids"][WORDS.num_encoded :] == [
        WORDS.previous,
        7,
        WORDS.start,
        16,
        18,
        WORDS.no_timestamps,
    ]


def test_window_repetitive_tries_next_temperature() -> None:
    job = transcriber().window(AUDIO, WINDOW, "en", [])
    found, asks = run(job, [output([1] * 60), output([1, 2, WORDS.end])])
    assert [ask.params.temperature for ask in asks] == [0.0, 0.2]
    assert (found.segments[0].text, found.segments[0].temperature, found.num_tokens) == (" w1 w2", 0.2, 62)


def test_window_unlikely_and_silent_is_empty() -> None:
    job = transcriber().window(AUDIO, WINDOW, "en", [])
    found, asks = run(job, [output([1], total=-9.0), silence(0.7)])
    assert found.segments == []
    assert asks[1].params.logprob_token_ids == (WORDS.no_speech,)


def test_window_unlikely_and_loud_tries_all_temperatures() -> None:
    job = transcriber(temperatures=(0.0, 0.4)).window(AUDIO, WINDOW, "en", [])
    found, _ = run(job, [output([1], total=-9.0), silence(0.1), output([2], total=-9.0)])
    assert found.segments[0].text == " w2"
    assert found.segments[0].no_speech_prob == pytest.approx(0.1)


@pytest.mark.parametrize(("probability", "is_live"), [(0.1, True), (0.7, False)])
def test_window_live_tries_one_temperature(probability: float, is_live: bool) -> None:
    job = transcriber(is_live=True).window(AUDIO, WINDOW, "en", [])
    found, asks = run(job, [silence(probability), output([1] * 60)])
    assert asks[1].is_live == is_live
    assert (asks[1].params.output_kind is RequestOutputKind.CUMULATIVE) == is_live
    assert len(found.segments) == 1


def test_text_so_far_holds_back_what_may_change() -> None:
    letters = {1: " a", 2: "\ufffd", 3: " "}
    job = Transcriber(
        WORDS, SpeechOptions(), lambda _: [], lambda tokens: "".join(letters[one] for one in tokens)
    )
    assert [job.text_so_far(output(tokens)) for tokens in ([1], [1, 2], [1, 3, 2], [1, T0])] == [" a"] * 4


def test_detect_language_returns_code() -> None:
    found, (ask,) = run(transcriber(MANY).detect_language(AUDIO), [output([16])])
    assert found == "de"
    assert ask.params.allowed_token_ids == (15, 16)


def test_previous_keeps_end_of_prompt() -> None:
    ids = transcriber(prompt="a" * 100).previous()
    assert ids == [WORDS.previous, *[7] * (WORDS.context // 2 - 1)]
    assert transcriber(prompt="  ").previous() == []


@pytest.mark.parametrize(("refused", "kind"), [(True, ValidationError), (False, EngineError)])
def test_window_failed_request_raises(refused: bool, kind: type[Exception]) -> None:
    job = transcriber().window(AUDIO, WINDOW, "en", [])
    with pytest.raises(kind, match="gone"):
        run(job, [output([], reason="error", stop_reason="gone", refused=refused)])


@pytest.mark.parametrize(
    ("given", "code"), [("de", "de"), ("German", "de"), ("en-US", "en"), (None, None), ("", None)]
)
def test_checked_language_any_spelling_returns_code(given: str | None, code: str | None) -> None:
    assert MANY.checked_language(given) == code


def test_checked_language_unknown_is_refused() -> None:
    with pytest.raises(ValidationError, match="has the languages en, de"):
        MANY.checked_language("tlh")
    with pytest.raises(ValidationError, match="English-only"):
        WORDS.checked_language("de")


def test_subtitles_of_segments() -> None:
    tokens = [T0, 1, T0 + 10, T0 + 12, 2, T0 + 30]
    found, _ = run(
        transcriber(timestamps=True).window(AUDIO, Window(3600 * 16_000, 3602 * 16_000), "en", []),
        [output(tokens)],
    )
    whole = transcription_of(WORDS, [found], "en", "transcribe", 3602.0)
    assert srt(whole).startswith("1\n01:00:00,000 --> 01:00:00,200\nw1\n\n2\n")
    assert vtt(whole).startswith("WEBVTT\n\n01:00:00.000 --> 01:00:00.200\nw1\n\n")
    assert whole.text == "w1 w2"
