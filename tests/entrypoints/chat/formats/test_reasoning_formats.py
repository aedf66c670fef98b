# SPDX-License-Identifier: Apache-2.0
"""Every reasoning format: reasoning and answer are separated, for any split of the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.reasoning import FORMATS
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.formats.tools import FORMATS as TOOL_FORMATS
from tests.fixtures.folded import folded

TAGGED = [row for row in FORMATS if row.opens and row.name != "openai_gptoss"]
IDS = [row.name for row in TAGGED]
THOUGHT = "Let me see:\n 2 < 3, <b> and so on. \n\nYes."
BY_NAME = {name: row for row in TOOL_FORMATS for name in (row.name, *row.aliases)}


def read(
    row: ReasoningFormat, pieces: Iterable[str], *, prompt: str = "", tool_format: ToolFormat | None = None
) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content, calls."""
    reader = AnswerFormat(tool_format, row).reader(prompt, {"now": {}} if tool_format else None)
    found: list[Event] = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    thought = "".join(event.text for event in found if isinstance(event, Reasoning))
    text = "".join(event for event in found if isinstance(event, str))
    return thought, text, [event for event in found if isinstance(event, ToolCall)]


def cuts(text: str) -> Iterable[list[str]]:
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))


@folded("row", TAGGED, ids=IDS)
def test_reasoning_precedes_the_answer_without_outer_space(row: ReasoningFormat) -> None:
    closed = f"\n{THOUGHT}\n{row.closes[0]}\n\nIt is 4.\n"
    for pieces in cuts(row.opens[0] + closed):
        assert read(row, pieces) == (THOUGHT, "It is 4.\n", [])
    for pieces in cuts(closed):
        assert read(row, pieces, prompt=f"user: hi\nassistant: {row.opens[0]}\n") == (
            THOUGHT,
            "It is 4.\n",
            [],
        )


@folded("row", TAGGED, ids=IDS)
def test_an_answer_without_reasoning_is_content(row: ReasoningFormat) -> None:
    prompt = (
        f"assistant: {row.opens[0]}\n\n{row.closes[0]}\n\n"  # as templates write it that switch thinking off
    )
    for pieces in cuts("It is 4.\n"):
        assert read(row, pieces, prompt=prompt) == ("", "It is 4.\n", [])


@folded("row", TAGGED, ids=IDS)
def test_reasoning_that_never_ends_is_reasoning(row: ReasoningFormat) -> None:
    for pieces in cuts(f"{row.opens[0]}{THOUGHT}"):
        assert read(row, pieces) == (THOUGHT, "", [])


@folded("row", [row for row in TAGGED if row.silent], ids=lambda row: row.name)
def test_markers_around_the_answer_are_no_part_of_it(row: ReasoningFormat) -> None:
    answer = f"{row.opens[0]}{THOUGHT}{row.closes[0]}\n{row.silent[0]}\nIt is 4.\n{row.silent[-1]}"
    for pieces in cuts(answer):
        assert read(row, pieces)[:2] == (THOUGHT, "It is 4.")


def test_known_model_begins_with_reasoning_without_a_marker() -> None:
    row = next(row for row in FORMATS if row.name == "deepseek_r1")
    for answer in (f"{THOUGHT}</think>4", f"<think>{THOUGHT}</think>4", f"\n<think>\n{THOUGHT}</think>4"):
        for pieces in cuts(answer):
            assert read(row, pieces, prompt="<｜Assistant｜>") == (THOUGHT, "4", [])


@folded("name", ["hermes", "kimi_k2", "qwen3_coder", "llama3_json", "pythonic", "deepseek_v31"])
def test_calls_come_after_the_reasoning_and_none_out_of_it(name: str) -> None:
    row = next(row for row in FORMATS if row.name == "qwen3")
    tool_format = BY_NAME[name]
    call = tool_format.write([("now", {})])
    for pieces in cuts(f"<think>I could {call} this.</think>\n\n{call}"):
        thought, text, calls = read(row, pieces, tool_format=tool_format)
        assert (thought, text) == (f"I could {call} this.", "")
        assert [found.name for found in calls] == ["now"]


def test_a_call_ends_the_reasoning_of_models_that_forget_to() -> None:
    row = next(row for row in FORMATS if row.name == "kimi_k2")
    for pieces in cuts(f"<think>{THOUGHT}\n{BY_NAME['kimi_k2'].write([('now', {})])}"):
        thought, text, calls = read(row, pieces, tool_format=BY_NAME["kimi_k2"])
        assert (thought, text, [found.name for found in calls]) == (THOUGHT, "", ["now"])


HARMONY = next(row for row in FORMATS if row.name == "openai_gptoss")
HARMONY_TOOLS = BY_NAME["openai"]
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
START = "<|start|>assistant"
CALL = f'{START}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{"a": 1}}<|call|>'


@folded(
    ("answer", "thought", "text", "calls"),
    [
        ("<|channel|>final<|message|>Hello.", "", "Hello.", []),
        ("<|channel|>final<|message|>Hello.<|return|>", "", "Hello.", []),
        (f"{ANALYSIS}{START}<|channel|>final<|message|>Hello.", THOUGHT, "Hello.", []),
        (f"<|channel|>analysis<|message|>{THOUGHT}", THOUGHT, "", []),
        ("Hello.", "", "Hello.", []),
        ("  Hello. ", "", "  Hello. ", []),
        (
            f"{ANALYSIS}{START}<|channel|>commentary<|message|>I look.<|end|>{CALL}",
            THOUGHT,
            "I look.",
            [ToolCall("now", '{"a": 1}')],
        ),
        (
            f"{ANALYSIS}{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
            THOUGHT,
            "",
            [ToolCall("now", "{}")],
        ),
        ("<|channel|>commentary to=functions.now<|message|>{oops<|call|>", "", "{oops", []),
    ],
)  # fmt: skip
def test_harmony(answer: str, thought: str, text: str, calls: list[ToolCall]) -> None:
    for pieces in cuts(answer):
        assert read(HARMONY, pieces, prompt="<|start|>assistant", tool_format=HARMONY_TOOLS) == (
            thought,
            text,
            calls,
        )


def test_harmony_continues_a_message_begun_in_the_prompt() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    for pieces in cuts(f"{THOUGHT}<|end|>{START}<|channel|>final<|message|>Hello."):
        assert read(HARMONY, pieces, prompt=prompt) == (THOUGHT, "Hello.", [])


words = st.sampled_from(
    [
        *sorted({m for row in FORMATS for m in (*row.opens, *row.closes, *row.silent)}),
        " ",
        "\n",
        "x",
        "<",
        "it is",
    ]
)


@folded("row", FORMATS, ids=lambda row: row.name)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(text=st.lists(words, max_size=9).map("".join), data=st.data())
def test_cuts_do_not_change_parsed_reasoning(row: ReasoningFormat, text: str, data: st.DataObject) -> None:
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = read(row, [text])
    assert read(row, [text[start:end] for start, end in itertools.pairwise([0, *at, len(text)])]) == whole
    assert read(row, list(text)) == whole
