# SPDX-License-Identifier: Apache-2.0
"""Answers read in pieces, for the tests of the formats."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import AnswerFormat

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


def read(
    row: ToolFormat,
    pieces: Iterable[str],
    reasoning: ReasoningFormat | None = None,
    prompt: str = "",
    *,
    was_cut: bool = False,
) -> list[Event]:
    """Read an answer in pieces and return its events, with neighboring texts joined."""
    reader = AnswerFormat(row, reasoning).reader(prompt, TOOLS)
    found = [event for piece in pieces for event in reader.feed(piece)] + reader.finish(was_cut=was_cut)
    joined: list[Event] = []
    for event in found:
        if isinstance(event, str) and joined and isinstance(joined[-1], str):
            joined[-1] += event
        elif isinstance(event, Reasoning) and joined and isinstance(joined[-1], Reasoning):
            joined[-1] = Reasoning(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def said(events: list[Event]) -> tuple[str, Calls]:
    """The content, and the calls with their arguments as JSON has them."""
    calls = [event for event in events if isinstance(event, ToolCall)]
    text = "".join(event for event in events if isinstance(event, str))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def cuts(text: str, most: int = 40) -> Iterator[list[str]]:
    """Whole, by character, and in two: every way, or of a text with more of them some `most`."""
    yield [text]
    yield list(text)
    step = max(1, len(text) // most)
    yield from ([text[:at], text[at:]] for at in range(1, len(text), step))


def cut_in_three(text: str) -> Iterator[list[str]]:
    for first, second in itertools.combinations(range(1, len(text)), 2):
        yield [text[:first], text[first:second], text[second:]]


def pieces_of(text: str, sizes: Iterable[int]) -> Iterator[list[str]]:
    """Cut into pieces of one size, for each size."""
    for size in sizes:
        yield [text[at : at + size] for at in range(0, len(text), size)]


def cut_by_chance(text: str, rng: random.Random, count: int) -> Iterator[list[str]]:
    for _ in range(count):
        at = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
        yield [text[start:end] for start, end in itertools.pairwise([0, *at, len(text)])]
