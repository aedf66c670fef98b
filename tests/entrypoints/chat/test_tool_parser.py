"""The Hermes parser: any way of cutting the text gives the same result, and nothing makes it fail."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.tag_scanner import TagScanner
from quire.entrypoints.chat.tool_parser import (
    TOOL_PARSERS,
    HermesParser,
    PlainParser,
    ToolCall,
    ToolParser,
    resolve_tool_parser,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
F = ToolCall("f", '{"a": "ü"}')


def parsed(parser: ToolParser, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    """All text joined, and all calls."""
    found = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    text = "".join(item for item in found if isinstance(item, str))
    return text, [item for item in found if isinstance(item, ToolCall)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("plain  text \n", "plain  text \n", []),
        (CALL, "", [F]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [F]),
        (f"{CALL}\n{CALL}\n", "", [F, F]),
        (f"{CALL} bye ", " bye ", [F]),
        (f"a {CALL} b {CALL} c", "a b c", [F, F]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [ToolCall("f", "{}")]),
        ("<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ('x <tool_call>{"name": "f', 'x <tool_call>{"name": "f', []),
        ("a <tool_cal", "a <tool_cal", []),
        ("a < b", "a < b", []),
        ("</tool_call>", "</tool_call>", []),
        ("<tool_call>__import__('os')</tool_call>", None, []),
    ],
)
def test_cases(text: str, content: str | None, calls: list[ToolCall]) -> None:
    expected = (text if content is None else content, calls)
    assert parsed(HermesParser(), [text]) == expected
    assert parsed(HermesParser(), list(text)) == expected


bits = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "{", '"', "[", "\\", " ", "\n", "é", "x"]
)


@pytest.mark.item(18)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=st.lists(bits, max_size=12).map("".join), data=st.data())
def test_cuts_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = parsed(HermesParser(), [text])
    assert parsed(HermesParser(), pieces) == (content, calls)
    assert parsed(HermesParser(), list(text)) == (content, calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    if not calls:
        assert content == text


@pytest.mark.item(18, 58)
@settings(derandomize=True, deadline=None, max_examples=200)
@given(text=st.text("ab<t>", max_size=30), cut=st.integers(0, 30))
def test_scanner_loses_nothing(text: str, cut: int) -> None:
    scanner = TagScanner("<t>")
    found = [*scanner.feed(text[:cut]), *scanner.feed(text[cut:]), scanner.flush()]
    assert "".join("<t>" if piece is None else piece for piece in found) == text
    assert found.count(None) == text.count("<t>")


@pytest.mark.item(18)
@pytest.mark.parametrize("filler", ["[", "{", '"', "<", '{"a":', "\\"])
def test_hostile_text_costs_linear_time(filler: str) -> None:
    text = "<tool_call>" + filler * 20_000
    start = time.process_time()
    assert parsed(HermesParser(), [text])[1] == []
    assert parsed(HermesParser(), list(text))[0] == text
    assert time.process_time() - start < 5


@pytest.mark.item(18)
def test_deep_nesting_is_no_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 10**6 + "]" * 10**6 + "}</tool_call>"
    assert parsed(HermesParser(), [text]) == (text, [])


def test_registry() -> None:
    assert resolve_tool_parser("none", CALL) is None
    assert resolve_tool_parser("auto", None) is None
    assert resolve_tool_parser("auto", "no tools here") is None
    assert resolve_tool_parser("auto", "write <tool_call>") is HermesParser
    assert resolve_tool_parser("hermes", None) is TOOL_PARSERS["hermes"]
    assert parsed(PlainParser(), [CALL, ""]) == (CALL, [])
