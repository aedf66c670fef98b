# SPDX-License-Identifier: Apache-2.0
"""Every tool format: what is written is read again, however it is cut; nothing leaks, is lost, or fails."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.tools import FORMATS
from tests.entrypoints.chat.formats.reading import Calls, cuts, read, said
from tests.entrypoints.chat.formats.transcripts import TWO
from tests.fixtures.folded import folded

IDS = [row.name for row in FORMATS]


@folded("row", [row for row in FORMATS if not row.bare and row.name != "openai"], ids=lambda row: row.name)
def test_text_around_calls_stays_and_the_space_between_goes(row: ToolFormat) -> None:
    written = f"Let me look. \n{row.write(TWO)}"
    for pieces in cuts(written):
        assert said(read(row, pieces)) == ("Let me look.", TWO), pieces
    if row.closes:
        for pieces in cuts(f"{written}\nThat was it. "):
            assert said(read(row, pieces)) == ("Let me look.\nThat was it. ", TWO), pieces


@folded("row", FORMATS, ids=IDS)
def test_plain_text_passes_as_it_is(row: ToolFormat) -> None:
    for text in ("", "Hello.", " \n x < y > z [1, 2] {a} ``` <tool <|to \n", "The answer is 42.\n\n"):
        for pieces in cuts(text):
            assert said(read(row, pieces)) == (text, [])


WRITTEN: list[Calls] = [TWO, [("now", {})], [("get_weather", {"city": 'a "b" ] } )', "tags": [1, None]})]]
words = st.sampled_from(
    [
        *sorted({part for row in FORMATS for part in (*row.opens, *row.closes, *row.skips, row.opening)} - {""}),
        *(row.write(WRITTEN[index % len(WRITTEN)]) for index, row in enumerate(FORMATS)),
        "{", "}", "[", "]", "(", ")", '"', "'", "\\", "<", " ", "\n", "now", "get_weather(", "x", "ü",
        '{"name": "now"}',
        "<parameter=city>", "</parameter>", "</function>", "<function=now>", "<arg_key>", "</arg_value>", "<escape>",
        "<|message|>", "<|channel|>", "analysis", "<|end|>",
    ]
)  # fmt: skip


@pytest.mark.item(18, 58)
@folded("row", FORMATS, ids=IDS)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(text=st.lists(words, max_size=9).map("".join), data=st.data())
def test_any_text_parses_alike_in_any_pieces_to_json_arguments(
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


@folded(
    "value",
    [
        "-" * 10**5 + "1",
        "not " * 10**5 + "1",
        "[" * 10**5,
        "x" + ".a" * 10**5,
        "1" + "+1" * 10**5,
        "'\x00'",
        "9" * 5000,
    ],
    ids=["minus", "not", "lists", "attributes", "sums", "null", "digits"],
)
def test_python_that_is_too_much_for_its_parser_is_content(value: str) -> None:
    row = next(row for row in FORMATS if row.name == "pythonic")
    text = f"[get_weather(limit={value})]"
    assert said(read(row, [text])) == (text, [])
