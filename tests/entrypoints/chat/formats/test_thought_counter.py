# SPDX-License-Identifier: Apache-2.0
"""Tokens of reasoning are counted in every format, also if the reasoning mentions markers of calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.chat.formats.reasoning import FORMATS
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.formats.tools import FORMATS as TOOL_FORMATS
from quire.entrypoints.openai.chat_completions import ChatChoiceBuilder
from tests.entrypoints.chat.formats.reading import TOOLS
from tests.fixtures.folded import folded

BY_NAME = {name: row for row in TOOL_FORMATS for name in (row.name, *row.aliases)}
ENDING = [row for row in FORMATS if row.ends_at_calls]


class Tokens:
    """A token per character, and one for each of some markers."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        self.special_tokens = special_tokens
        self._parts = re.compile("|".join([*map(re.escape, special_tokens), "(?s:.)"]))

    def spelled(self, text: str) -> list[str]:
        return self._parts.findall(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        return [
            0x110000 + self.special_tokens.index(part) if part in self.special_tokens else ord(part)
            for part in self.spelled(text)
        ]


def tool_format_of(row: ReasoningFormat) -> ToolFormat:
    """Return the tool format of the same family, or else the most common one."""
    return next((BY_NAME[name] for name in (row.name, *row.aliases) if name in BY_NAME), BY_NAME["hermes"])


def check(row: ReasoningFormat, answer: str, thought: str, *, has_tools: bool = True) -> None:
    """Check the count of a thought's tokens, in chunks of any size, with markers as special tokens and as text."""
    tool_format = tool_format_of(row)
    longest = max(map(len, (*row.opens, *row.closes, *tool_format.opens)))
    for special in ((), (*row.opens, *row.closes, *tool_format.opens)):
        tokens = Tokens(special)
        formats = ModelFormat(AnswerFormat(tool_format, row), tokens)
        tools, begin = TOOLS if has_tools else None, PromptEnd()
        spelled, ids = tokens.spelled(answer), tokens.encode(answer)
        for size in (1, 2, 7, len(ids)):
            builder = ChatChoiceBuilder(formats.reader(begin, tools), formats.counter(begin, tools))
            for start in range(0, len(ids), size):
                end = start + size
                reason = "stop" if end >= len(ids) else None
                builder.parts("".join(spelled[start:end]), ids[start:end], reason)
                assert (
                    builder.num_reasoning_tokens < len(tokens.spelled(thought)) + longest
                )  # a marker's beginning
            assert builder.num_reasoning_tokens == len(tokens.spelled(thought)), (special, size)


@folded("row", [row for row in FORMATS if row.opens], ids=lambda row: row.name)
def test_a_marker_that_is_mentioned_ends_nothing(row: ReasoningFormat) -> None:
    for marker in tool_format_of(row).opens or ("<tool_call>",):
        for thought in (f"{marker} opens a call.", f"I write {marker}{{1}} and {marker}, or {marker}\n?\n"):
            check(row, f"{row.opens[0]}{thought}{row.closes[0]}\n\nIt is 4.", thought)
            check(row, f"{row.opens[0]}{thought}{row.closes[0]}\n\nIt is 4.", thought, has_tools=False)
            check(row, f"{row.opens[0]}{thought}", thought)


@folded("row", ENDING, ids=lambda row: row.name)
def test_call_ends_reasoning_after_mentioned_markers(row: ReasoningFormat) -> None:
    tool_format = tool_format_of(row)
    call = tool_format.write([("now", {}), ("get_weather", {"city": "Paris"})])
    for mention in (
        "",
        f"{tool_format.opens[0]}? ",
        f"not {tool_format.opens[0]} but {tool_format.opens[0]}, ",
    ):
        check(row, f"{row.opens[0]}{mention}yes {call}", f"{mention}yes ")
        check(row, f"{row.opens[0]}{mention}yes {call}{row.opens[0]}Hm{row.closes[0]}4", f"{mention}yes Hm")


@folded("row", ENDING, ids=lambda row: row.name)
def test_calls_behind_the_reasoning_are_none_of_it(row: ReasoningFormat) -> None:
    call = tool_format_of(row).write([("now", {})])
    check(row, f"{row.opens[0]}yes{row.closes[0]}{call}", "yes")


@folded("row", ENDING, ids=lambda row: row.name)
def test_malformed_call_is_part_of_the_reasoning(row: ReasoningFormat) -> None:
    tool_format = tool_format_of(row)
    good = tool_format.write([("now", {})])
    thought = f"so {good[: len(good) // 2]}"
    check(row, f"{row.opens[0]}{thought}", thought)
