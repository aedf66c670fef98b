# SPDX-License-Identifier: Apache-2.0
"""Transcripts of every format: read as they should be, and however they are cut."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.tools import FORMATS
from tests.entrypoints.chat.formats.reading import (
    Calls,
    cut_by_chance,
    cut_in_three,
    cuts,
    pieces_of,
    read,
    said,
)
from tests.entrypoints.chat.formats.transcripts import REASONING, TRANSCRIPTS, TWO, Transcript, lost
from tests.fixtures.folded import folded
from tests.fixtures.quick import quick

OF_FORMAT = {
    name: [transcript for transcript in TRANSCRIPTS if transcript.format == name]
    for name in dict.fromkeys(transcript.format for transcript in TRANSCRIPTS)
}
by_format = folded("transcripts", OF_FORMAT.values(), ids=OF_FORMAT)
"""A case for each format: a case for each transcript would take longer to collect than to run."""
at_places = pytest.mark.parametrize("num_places", quick([17, 10_000], [17]))
"""Each answer is cut off at so many places, or at all of them."""
SHORT = 80
"""Of these texts, some of each format, every way of cutting them in three is tried."""
LONGEST = 250
"""Longer texts, of which there are few, are not cut at every place, nor in larger pieces."""


def events_of(transcript: Transcript, pieces: Iterable[str]) -> list[Event]:
    reasoning = REASONING[transcript.reasoning] if transcript.reasoning else None
    return read(transcript.row, pieces, reasoning, transcript.prompt)


def test_every_format_has_a_dozen_transcripts() -> None:
    counts = Counter(transcript.row.name for transcript in TRANSCRIPTS)
    assert min(counts[row.name] for row in FORMATS) >= 12
    named = [(transcript.format, transcript.what) for transcript in TRANSCRIPTS]
    assert len(set(named)) == len(named)


@pytest.mark.item(18)
@by_format
def test_transcript_cut_anyhow_is_read_as_it_should_be(transcripts: list[Transcript]) -> None:
    for transcript in transcripts:
        text = transcript.text
        whole = events_of(transcript, [text])
        assert said(whole) == (transcript.content, transcript.calls), transcript
        thought = "".join(event.text for event in whole if isinstance(event, Reasoning))
        assert thought == transcript.thought, transcript
        by_size = pieces_of(text, (2, 3, 5, 16))
        for pieces in (*cuts(text), *by_size, *cut_by_chance(text, random.Random(1), 5)):
            assert events_of(transcript, pieces) == whole, (transcript, pieces)


@pytest.mark.more
@by_format
def test_short_transcript_cut_in_any_three_is_read_alike(transcripts: list[Transcript]) -> None:
    for transcript in (one for one in transcripts if len(one.text) <= SHORT):
        whole = events_of(transcript, [transcript.text])
        for pieces in cut_in_three(transcript.text):
            assert events_of(transcript, pieces) == whole, (transcript, pieces)


@pytest.mark.more
@by_format
def test_transcript_in_pieces_of_any_size_is_read_alike(transcripts: list[Transcript]) -> None:
    for transcript in transcripts:
        text = transcript.text
        whole = events_of(transcript, [text])
        by_size = pieces_of(text, range(2, min(len(text), LONGEST)))
        for pieces in (*cuts(text, LONGEST), *by_size, *cut_by_chance(text, random.Random(2), 100)):
            assert events_of(transcript, pieces) == whole, (transcript, pieces)


@at_places
@by_format
def test_answer_cut_off_has_no_call_but_complete_ones(transcripts: list[Transcript], num_places: int) -> None:
    for transcript in transcripts:
        text = transcript.text
        for end in range(0, len(text), max(1, len(text) // num_places)):
            whole = events_of(transcript, [text[:end]])
            assert events_of(transcript, *pieces_of(text[:end], [3])) == whole, (transcript, end)
            content, calls = said(whole)
            assert calls == transcript.calls[: len(calls)], (transcript, end)
            if not calls and transcript.reasoning is None and transcript.format != "openai":
                assert content == text[:end], transcript


@at_places
@by_format
def test_answer_cut_anywhere_shows_no_begun_markup(transcripts: list[Transcript], num_places: int) -> None:
    for transcript in transcripts:
        reasoning = REASONING[transcript.reasoning] if transcript.reasoning else None
        for end in range(0, len(transcript.text), max(1, len(transcript.text) // num_places)):
            text = transcript.text[:end]
            found = read(transcript.row, [text], reasoning, transcript.prompt, was_cut=True)
            content, calls = said(found)
            thought = "".join(event.text for event in found if isinstance(event, Reasoning))
            assert calls == transcript.calls[: len(calls)], (transcript, end)
            assert transcript.thought.startswith(thought.rstrip()), (transcript, end)
            is_known_as_text = not transcript.calls and content == text
            assert is_known_as_text or transcript.content.startswith(content.rstrip()), (transcript, end)


@folded(
    ("format_name", "text", "content"),
    [
        ("hermes", "I look.\n<tool_call>\n{", "I look."),
        ("hermes", "I look.\n<tool", "I look."),
        ("hermes", "if a < b", "if a < b"),
        ("phi4_mini_json", "the end of", "the end of"),
        ("phi4_mini_json", "functools", ""),
        ("llama3_json", '{"city": "Par', '{"city": "Par'),
        ("llama3_json", '{"name": "Bob", "age', '{"name": "Bob", "age'),
        ("llama3_json", '{"name": "get_w', ""),
        ("llama3_json", '{"type": "function", "na', ""),
        ("pythonic", "[see", "[see"),
        ("pythonic", "[1, 2", "[1, 2"),
        ("pythonic", "[get_weather(city='P", ""),
        ("xlam", '[{"name": "now", "arguments": {}}, {"na', ""),
    ],
)
def test_cut_answer_keeps_text_and_drops_begun_call(format_name: str, text: str, content: str) -> None:
    row = next(row for row in FORMATS if row.name == format_name)
    assert said(read(row, [text], was_cut=True))[0] == content
    assert said(read(row, list(text), was_cut=True))[0] == content


def without_close(row: ToolFormat, text: str) -> str:
    return text.removesuffix(row.closing)


def doubled_opening(row: ToolFormat, text: str) -> str:
    return row.opening + text


def doubled_closing(row: ToolFormat, text: str) -> str:
    return text + row.closing


def inside_out(row: ToolFormat, text: str) -> str:
    return row.closing + text.removeprefix(row.opening).removesuffix(row.closing) + row.opening


def nested_in_itself(row: ToolFormat, text: str) -> str:
    return row.write([("get_weather", {"city": text})]).replace("\\", "")


def without_quotes(row: ToolFormat, text: str) -> str:
    return text.replace('"', "").replace("'", "")


def without_names(row: ToolFormat, text: str) -> str:
    return text.replace("get_weather", "").replace("now", "")


def half_a_call(row: ToolFormat, text: str) -> str:
    return text[: len(text) // 3] + text[2 * len(text) // 3 :]


MALFORMED = (
    without_close, doubled_opening, doubled_closing, inside_out, nested_in_itself, without_quotes, without_names,
    half_a_call,
)  # fmt: skip


@folded("row", FORMATS, ids=lambda row: row.name)
def test_malformed_answer_cut_anyhow_is_read_alike_and_whole(row: ToolFormat) -> None:
    for malform in MALFORMED:
        assert_alike_and_whole(row, malform(row, row.write(TWO)))


def assert_alike_and_whole(row: ToolFormat, text: str) -> None:
    whole = read(row, [text])
    for pieces in (*cuts(text), *pieces_of(text, (2, 3, 7))):
        assert read(row, pieces) == whole, pieces
    content, calls = said(whole)
    if not calls and row.name != "openai":
        assert content == text
    told = content + json.dumps(calls)
    words = ("Rome",) if row.name == "openai" else ("get_weather", "Rome")  # its heads are markers
    assert all(word in told for word in words if word in text)


@folded("row", FORMATS, ids=lambda row: row.name)
def test_a_missing_close_marker_costs_no_call_that_is_complete(row: ToolFormat) -> None:
    text = without_close(row, row.write(TWO))
    expected: Calls = TWO[:-1] if row.calls[0].write("f", {}).endswith(row.closing) and row.closing else TWO
    calls = said(read(row, [text]))[1]
    assert calls in (TWO, expected)


def test_a_call_without_a_name_comes_back_as_content() -> None:
    for row in FORMATS:
        text = row.write([("", {"city": "Paris"})])
        if row.name != "openai":
            assert said(read(row, [text])) == (lost(row.name, "no name", text).content, []), row.name


def test_ids_of_the_model_are_kept() -> None:
    by_name = {row.name: row for row in FORMATS}
    (call,) = read(by_name["mistral"], ["[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}"])
    assert call == ToolCall("now", "{}", "abc")
    calls = read(by_name["kimi_k2"], [by_name["kimi_k2"].write(TWO)])
    assert [call.id for call in calls if isinstance(call, ToolCall)] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]
