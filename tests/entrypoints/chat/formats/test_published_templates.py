# SPDX-License-Identifier: Apache-2.0
"""Published chat templates: an answer that a template writes into a history is read by the formats chosen for it.

A format of calls is chosen for every template that has a place for tools.

The templates are not part of this repository: `$QUIRE_REAL/templates/*.jinja`, by default of `build/real`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.chat.formats.examples import THINKING, Example, examples_of, shown
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import AnswerFormat, choose
from quire.entrypoints.chat.template import ChatTemplate
from tests.entrypoints.chat.formats.reading import pieces_of

FOLDER = Path(os.environ.get("QUIRE_REAL", "build/real")) / "templates"
TEMPLATES = sorted(FOLDER.glob("*.jinja"))

UNSEEN = {
    "LFM2-8B-A1B": "it leaves calls of a history out",
    "LFM2.5-Instruct": "it leaves calls of a history out",
    "ibm-granite-granite-3.3-2B-Instruct": "it leaves calls of a history out",
    "Kimi-K2-Instruct": "it changes a list, which the sandbox of templates refuses",
    "Kimi-K2-Thinking": "it changes a list, which the sandbox of templates refuses",
    "fireworks-ai-llama-3-firefunction-v2": "it wants variables that no client has",
    "llama-cpp-deepseek-r1": "it fails on every list of tools",
}
"""Templates that have a format and show no call, and the reason."""
UNMARKED = {"Apriel-1.6-15b-Thinker-fixed": "a history lacks the words that open reasoning in a prompt"}
"""Templates that write reasoning as no model does, and the reason."""
UNQUOTED = {"LFM2.5-8B-A1B": "quotes in a string stand as they are"}
"""Templates that write strings so that their end cannot be told, and the reason."""
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "p"},
        "count": {"type": "integer", "description": "c"},
        "ratio": {"type": "number", "description": "r"},
        "exact": {"type": "boolean", "description": "e"},
        "names": {"type": "array", "items": {"type": "string"}, "description": "n"},
        "where": {
            "type": "object",
            "description": "w",
            "properties": {"at": {"type": "string", "description": "a"}},
            "additionalProperties": {"type": "string"},
        },
    },
    "required": ["path"],
}
TOOLS = {"write_file": SCHEMA, "now": {"type": "object", "properties": {}}}
DECLARED = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"path": "a.py", "count": 3, "ratio": 0.5, "exact": True},
    {"path": "5", "names": ["a b", "c"], "where": {"at": "x", "deep": {"list": [1, True, {"k": "v"}]}}},
    {"path": 'say "hi" \\ it\'s {a: [1, 2]}, (b) <c> & d'},
    {"path": "def f():\n    return 1\n"},
    {"path": "ünï 🌍 東京", "names": []},
    {},
)
THOUGHT = "First I look.\nThen, <b>I</b> think & say."
SAID = "I look it up."
REST = re.compile(
    r"(?:[Aa]ssistant|<\|START_OF_TURN_TOKEN\|>.*|<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|\]~b\]\w*|\[e~\[|\s)*",
    re.DOTALL,
)
"""Markers around the end of a turn, which are special tokens that the formats do not show."""


def call(name: str, arguments: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "id": f"call0000{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def answers(*, thinks: bool) -> Iterator[dict[str, Any]]:
    thoughts = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT) if thinks else {}
    for arguments in ARGUMENTS:
        calls = [call("write_file", arguments, 1)]
        yield {"role": "assistant", "content": "", "tool_calls": calls, **thoughts}
    calls = [call("write_file", ARGUMENTS[0], 1), call("now", {}, 2)]
    yield {"role": "assistant", "content": "", "tool_calls": calls, **thoughts}
    yield {"role": "assistant", "content": SAID, "tool_calls": calls, **thoughts}
    yield {"role": "assistant", "content": SAID, **thoughts}


def turns(template: ChatTemplate) -> Iterator[tuple[dict[str, Any], Example]]:
    """Answers, and how the template writes them."""
    for options in THINKING:
        for answer in (*answers(thinks=True), *answers(thinks=False)):
            turn = shown(template, answer, tools=DECLARED, **options)
            if turn is not None:
                yield answer, turn


def spoken(formats: AnswerFormat, turn: Example) -> Example:
    """The turn behind the end of reasoning that its prompt begins and that it leaves out, as no model does."""
    row = formats.reasoning
    if row is None or row.name == "openai_gptoss" or not row.is_open_after(turn.prompt):
        return turn
    if any(close in turn.text for close in row.closes):
        return turn
    return Example(turn.prompt + row.closes[0], turn.text)


def read(formats: AnswerFormat, turn: Example, size: int) -> list[Event]:
    reader = formats.reader(turn.prompt, TOOLS)
    (pieces,) = pieces_of(turn.text, [size])
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def parts(events: list[Event]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls."""
    calls = [(one.name, json.loads(one.arguments)) for one in events if isinstance(one, ToolCall)]
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thought, "".join(event for event in events if isinstance(event, str)), calls


def is_unreadable(name: str, answer: dict[str, Any], turn: Example) -> bool:
    """Whether the template writes this answer so that nobody can read it."""
    calls = json.dumps(answer.get("tool_calls"), ensure_ascii=False)
    return (name in UNQUOTED and "it's" in calls) or (name in UNMARKED and THOUGHT in turn.text)


@pytest.mark.real
@pytest.mark.skipif(not TEMPLATES, reason=f"no templates in {FOLDER}")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_published_template_answers_are_read_back(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    formats = choose("auto", "auto", source, examples_of(template))
    assert formats.tools is not None or "tools" not in template.variables, formats.describe()
    num_shown = 0
    for answer, rendered in turns(template):
        turn = spoken(formats, rendered)
        if is_unreadable(path.stem, answer, turn):
            continue
        thought, text, calls = parts(read(formats, turn, 10**6))
        wanted = [
            (one["function"]["name"], one["function"]["arguments"]) for one in answer.get("tool_calls", [])
        ]
        if wanted and "write_file" in turn.text:
            num_shown += 1
            assert calls == (wanted if "now" in turn.text else wanted[:1]), (turn, text)
        if THOUGHT in turn.text:
            assert thought == THOUGHT, turn
        assert REST.fullmatch(text.replace(SAID, "", 1)), (turn, text)
        assert SAID in thought + text or SAID not in turn.text
        for size in (1, 3, 7):
            assert parts(read(formats, turn, size)) == (thought, text, calls)
    assert num_shown or formats.tools is None or path.stem in UNSEEN, "the template shows no call"
