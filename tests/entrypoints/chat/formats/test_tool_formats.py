"""Every tool format: what is written is read again, however it is cut; nothing leaks, is lost, or fails."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.formats.choice import AnswerFormat
from quire.entrypoints.chat.formats.events import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.tools import FORMATS

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "limit": {"type": ["number", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Calls = list[tuple[str, dict[str, Any]]]
CASES: list[Calls] = [
    [("now", {})],
    [("get_weather", {"city": "Paris"})],
    [("get_weather", {"city": "Zürich 🌍 東京", "days": -3, "exact": True, "limit": None})],
    [("get_weather", {"where": {"at": {"lat": 1.5, "on": [1, "two", None]}}, "tags": []})],
    [("get_weather", {"city": "Rome"}), ("now", {})],
    [("now", {}), ("get_weather", {"city": "Oslo", "days": 2}), ("now", {})],
    [("get_weather", {"city": "a \"quoted\" \\ back\\slash and 'single' one"})],
    [("get_weather", {"city": "brackets ] } ) [ { ( and , ; :"})],
    [("get_weather", {"city": "line\nline\n\nline"})],
    [("get_weather", {"city": ""})],
    [("get_weather", {"city": "x" * 3000})],
    [("get_weather", {"city": " spaces "})],
]
IDS = [row.name for row in FORMATS]


def read(row: ToolFormat, pieces: Iterable[str]) -> list[Event]:
    """What is found, with neighbouring texts joined."""
    reader = AnswerFormat(row).reader("", TOOLS)
    found = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    joined: list[Event] = []
    for event in found:
        if isinstance(event, str) and joined and isinstance(joined[-1], str):
            joined[-1] += event
        elif isinstance(event, Reasoning) and joined and isinstance(joined[-1], Reasoning):
            joined[-1] = Reasoning(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def cuts(text: str) -> Iterable[list[str]]:
    """Whole, by character, and every way of cutting it in two; of a long text, some of these."""
    yield [text]
    yield list(text)
    step = max(1, len(text) // 300)
    yield from ([text[:at], text[at:]] for at in range(1, len(text), step))


def said(events: list[Event]) -> tuple[str, Calls]:
    calls = [event for event in events if isinstance(event, ToolCall)]
    text = "".join(event for event in events if isinstance(event, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("row", FORMATS, ids=IDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_a_model_writes_is_read_however_it_is_cut(row: ToolFormat, case: int) -> None:
    written = row.write(CASES[case])
    for pieces in cuts(written):
        assert said(read(row, pieces)) == ("", CASES[case]), pieces


@pytest.mark.parametrize(
    "row", [row for row in FORMATS if not row.bare and row.name != "openai"], ids=lambda row: row.name
)
def test_text_around_calls_stays_and_the_space_between_goes(row: ToolFormat) -> None:
    written = f"Let me look. \n{row.write(CASES[4])}"
    for pieces in cuts(written):
        assert said(read(row, pieces)) == ("Let me look.", CASES[4]), pieces
    if row.closes:
        for pieces in cuts(f"{written}\nThat was it. "):
            assert said(read(row, pieces)) == ("Let me look.\nThat was it. ", CASES[4]), pieces


@pytest.mark.parametrize("row", FORMATS, ids=IDS)
def test_plain_text_passes_as_it_is(row: ToolFormat) -> None:
    for text in ("", "Hello.", " \n x < y > z [1, 2] {a} ``` <tool <|to \n", "The answer is 42.\n\n"):
        for pieces in cuts(text):
            assert said(read(row, pieces)) == (text, [])


@pytest.mark.parametrize("row", FORMATS, ids=IDS)
def test_a_cut_off_answer_is_the_same_however_it_is_cut(row: ToolFormat) -> None:
    written = row.write(CASES[4])
    for end in range(len(written)):
        text = written[:end]
        whole = read(row, [text])
        assert read(row, list(text)) == whole
        assert said(whole)[1] == CASES[4][: len(said(whole)[1])]


words = st.sampled_from(
    [
        *sorted({part for row in FORMATS for part in (*row.opens, *row.closes, *row.skips, row.opening)} - {""}),
        *(FORMATS[index].write(CASES[index % 8]) for index in range(len(FORMATS))),
        "{", "}", "[", "]", "(", ")", '"', "'", "\\", "<", " ", "\n", "now", "get_weather(", "x", "ü",
        '{"name": "now"}',
        "<parameter=city>", "</parameter>", "</function>", "<function=now>", "<arg_key>", "</arg_value>", "<escape>",
        "<|message|>", "<|channel|>", "analysis", "<|end|>",
    ]
)  # fmt: skip


@pytest.mark.parametrize("row", FORMATS, ids=IDS)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(text=st.lists(words, max_size=9).map("".join), data=st.data())
def test_whatever_is_written_cuts_do_not_matter_and_arguments_are_json(
    row: ToolFormat, text: str, data: st.DataObject
) -> None:
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = read(row, [text])
    assert read(row, [text[start:end] for start, end in itertools.pairwise([0, *at, len(text)])]) == whole
    assert read(row, list(text)) == whole
    content, calls = said(whole)
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    if not calls and row.name != "openai":
        assert content == text
