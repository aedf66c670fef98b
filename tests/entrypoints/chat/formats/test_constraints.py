# SPDX-License-Identifier: Apache-2.0
"""Calls that are enforced: what a format writes is allowed, and whatever is allowed is read as valid calls."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.formats.answer import AnswerParser
from quire.entrypoints.chat.formats.constraint import Form, fixed
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.reasoning import FORMATS as REASONING
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import choose
from quire.entrypoints.chat.formats.tools import FORMATS
from quire.entrypoints.chat.tool_grammar import (
    AllowedCalls,
    AllowedFunction,
    after_reasoning,
    calls_in_text,
    calls_only,
)
from quire.errors import ValidationError
from quire.json_schema.structural_tag import as_tag
from quire.structured_output.backend import Masks, Matcher
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.normalize import normalize
from quire.structured_outputs_params import StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from tests.fixtures.folded import folded

ROWS = [row for row in FORMATS if row.name != "openai"]
BY_NAME = {row.name: row for row in ROWS}
IDS = [row.name for row in ROWS]
MARKER = re.compile(
    r"<\|[^<>|]*\|>|<\|[a-z_]+>|<[a-z_]+\|>|\]<\]minimax\[>\[|</?｜[^<>]*>|<｜[^<>｜]*｜>|</?[a-z_:]+>|\[[A-Z_]+\]"
)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=6)
SHORT: dict[str, Any] = {"type": "string", "maxLength": 5}
VALUES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string", "maxLength": 6}, TEXT),
    "some": ({"type": "string", "minLength": 1, "maxLength": 6}, TEXT.filter(bool)),
    "whole": ({"type": "integer"}, st.integers(-(10**15), 10**15)),
    "bound": ({"type": "integer", "minimum": 0, "maximum": 9}, st.integers(0, 9)),
    "number": ({"type": "number"}, st.sampled_from([0, 1.5, -2.25, 1e-5, 1000000.0])),
    "flag": ({"type": "boolean"}, st.booleans()),
    "nothing": ({"type": "null"}, st.none()),
    "unit": ({"enum": ["C", "F"]}, st.sampled_from("CF")),
    "level": ({"type": "integer", "enum": [1, 2]}, st.sampled_from([1, 2])),
    "const": ({"const": "5"}, st.just("5")),
    "maybe": ({"type": ["string", "null"], "maxLength": 4}, st.none() | st.text("ab", max_size=4)),
    "either": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, st.none() | st.integers(0, 99)),
    "referred": ({"$ref": "#/$defs/color"}, st.sampled_from(["red", "blue"])),
    "items": ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, st.lists(st.integers(0, 9), max_size=3)),
    "names": (
        {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
        st.lists(st.text("ab'", max_size=4), min_size=1, max_size=2),
    ),
    "inner": (
        {
            "type": "object",
            "properties": {"a": SHORT, "b": {"type": "boolean"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        st.fixed_dictionaries({}, optional={"a": st.text("xy", max_size=4)}).flatmap(
            lambda some: st.booleans().map(lambda flag: {**some, "b": flag})
        ),
    ),
}  # fmt: skip
"""Schemas that every format can say, and their values."""


@st.composite
def functions(draw: st.DrawFn) -> tuple[dict[str, dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """Some functions, and some calls of them."""
    schemas: dict[str, dict[str, Any]] = {}
    for name in draw(
        st.lists(st.sampled_from(["look_up", "now", "f2"]), min_size=1, max_size=2, unique=True)
    ):
        keys = draw(st.lists(st.sampled_from(list(VALUES)), max_size=4, unique=True))
        required = [key for key in keys if draw(st.booleans())]
        schemas[name] = {
            "type": "object",
            "properties": {key: VALUES[key][0] for key in keys},
            "required": required,
            "additionalProperties": False,
            "$defs": {"color": {"enum": ["red", "blue"]}},
        }
    calls = []
    for name in draw(st.lists(st.sampled_from(list(schemas)), min_size=1, max_size=3)):
        schema = schemas[name]
        given_keys = [key for key in schema["properties"] if key in schema["required"] or draw(st.booleans())]
        calls.append((name, {key: draw(VALUES[key][1]) for key in given_keys}))
    return schemas, calls


def special_of(row: ToolFormat) -> tuple[str, ...]:
    """The markers of a format, which many tokenizers have as special tokens."""
    literals = [row.opening, row.separator, row.closing, *row.opens, *row.closes, *row.skips]
    literals += [str(value) for value in vars(row.calls[0]).values()]
    return tuple(dict.fromkeys(found for text in literals for found in MARKER.findall(text)))


class Walker:
    """Texts under a constraint, token by token."""

    def __init__(self, form: Form, special: tuple[str, ...] = ()) -> None:
        self._vocabulary = Vocabulary.from_bytes(special)
        self._names = {token_id: name for name, token_id in self._vocabulary.special.items()}
        backend = GuidanceBackend(self._vocabulary)
        self._grammar = backend.compile(normalize(as_tag(form), StructuredOutputsSettings()))

    def takes(self, text: str, *, is_whole: bool = True) -> bool:
        """Whether a text is allowed from beginning to end, or as the beginning of one."""
        names = sorted(self._vocabulary.special, key=len, reverse=True)
        matcher = self._grammar.new_matcher()
        for place, part in enumerate(re.split(f"({'|'.join(map(re.escape, names))})", text)):
            ids = [self._vocabulary.special[part]] if place % 2 else list(part.encode())
            if not all(not matcher.is_complete and matcher.advance(token_id) for token_id in ids):
                return False
        return matcher.may_end or not is_whole

    def wander(self, rng: random.Random, limit: int = 600) -> str | None:
        """A text of tokens by chance; None if it has no end by then."""
        matcher, written = self._grammar.new_matcher(), list[bytes]()
        while not matcher.is_complete:
            allowed = self._allowed(matcher)
            if matcher.may_end and rng.random() < 0.3:
                break
            if len(written) > limit:
                return None
            token_id = rng.choice(allowed)
            assert matcher.advance(token_id)
            written.append(self._spelled(token_id))
        return b"".join(written).decode()

    def _spelled(self, token_id: int) -> bytes:
        return self._names[token_id].encode() if token_id in self._names else bytes([token_id])

    def _allowed(self, matcher: Matcher) -> list[int]:
        size = len(self._vocabulary.tokens)
        masks = Masks(1, size)
        matcher.fill(masks, 0)
        masks.forbid(0, self._vocabulary.ends)
        return np.flatnonzero(np.unpackbits(masks.words[0].view(np.uint8), bitorder="little")[:size]).tolist()


def read(
    text: str,
    row: ToolFormat,
    schemas: dict[str, Any],
    reasoning: ReasoningFormat | None = None,
    *,
    inside: bool = False,
) -> list[Event]:
    parser = AnswerParser(row, reasoning, schemas, in_reasoning=inside)
    return parser.feed(text) + parser.finish()


def check_calls(found: list[Event], schemas: dict[str, Any]) -> None:
    assert found
    for event in found:
        assert isinstance(event, ToolCall), event
        jsonschema.validate(json.loads(event.arguments), schemas[event.name])


def strict(schemas: dict[str, Any]) -> list[AllowedFunction]:
    return [AllowedFunction(name, schema, True) for name, schema in schemas.items()]


@folded("row", ROWS, ids=IDS)
@settings(derandomize=True, max_examples=4, deadline=None)
@given(drawn=functions(), is_special=st.booleans())
def test_calls_written_by_a_format_are_allowed(row: ToolFormat, drawn: Any, is_special: bool) -> None:
    schemas, calls = drawn
    special = special_of(row) if is_special else ()
    text = row.write(calls)
    assert Walker(calls_only(row, strict(schemas), at_most_one=False), special).takes(text), text
    if not row.needs_required:
        assert Walker(calls_in_text(row, strict(schemas), at_most_one=False), special).takes(text), text


@folded("row", ROWS, ids=IDS)
@settings(derandomize=True, max_examples=4, deadline=None)
@given(drawn=functions(), is_special=st.booleans(), at_most_one=st.booleans(), seed=st.integers(0, 2**32))
def test_allowed_calls_parse_as_valid_calls(
    row: ToolFormat, drawn: Any, is_special: bool, at_most_one: bool, seed: int
) -> None:
    schemas, _ = drawn
    form = calls_only(row, strict(schemas), at_most_one=at_most_one)
    text = Walker(form, special_of(row) if is_special else ()).wander(random.Random(seed))
    if text is not None:
        found = read(text, row, schemas)
        check_calls(found, schemas)
        assert len(found) == 1 or not at_most_one


SCHEMAS = {"now": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}


PARTS_OF_TAGS = {
    "deepseek_v32": ("｜DSML｜",),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "minimax_m3": ("]<]minimax[>[",),
}
"""Formats of which tags hold special tokens, and are none."""


@pytest.mark.parametrize("name", PARTS_OF_TAGS)
def test_calls_with_special_tokens_in_tags_are_enforced(name: str) -> None:
    properties = {"a": {"type": "string", "maxLength": 9}, "e": {"enum": ["x", 1]}}
    schemas = {"f": {"type": "object", "properties": properties, "required": ["a", "e"]}}
    row, special = BY_NAME[name], PARTS_OF_TAGS[name]
    text = row.write([("f", {"a": "b c", "e": "x"}), ("f", {"a": "", "e": 1})])
    only = Walker(calls_only(row, strict(schemas), at_most_one=False), special)
    assert only.takes(text)
    assert not only.takes(row.write([("f", {"a": "b c", "e": "y"})]))
    assert Walker(calls_in_text(row, strict(schemas), at_most_one=False), special).takes(f"So. {text}")
    for seed in range(5):
        written = only.wander(random.Random(seed))
        if written is not None:
            check_calls(read(written, row, schemas), schemas)


def test_calls_in_text_that_begin_as_text_does_are_refused() -> None:
    with pytest.raises(ValidationError, match="use tool_choice required"):
        calls_in_text(BY_NAME["glm4"], strict(SCHEMAS), at_most_one=False)


@folded("row", [row for row in ROWS if not row.needs_required], ids=lambda row: row.name)
@folded("is_special", [False, True])
def test_a_call_in_text_is_enforced_from_its_marker_on(row: ToolFormat, is_special: bool) -> None:
    walker = Walker(
        calls_in_text(row, strict(SCHEMAS), at_most_one=False), special_of(row) if is_special else ()
    )
    good, other, bad = (
        row.write([("now", {"n": 1})]),
        row.write([("then", {"n": 1})]),
        row.write([("now", {})]),
    )
    assert walker.takes("It is noon.")
    assert walker.takes(good)
    assert not walker.takes(other)
    assert not walker.takes(bad)
    if any(row.opening.startswith(marker) for marker in row.opens):
        assert walker.takes(f"Let me see. {good}")
        assert not walker.takes(f"Let me see. {bad}")


@folded(
    "reasoning",
    [row for row in REASONING if row.opens and row.name != "openai_gptoss"],
    ids=lambda row: row.name,
)
@folded("is_special", [False, True])
def test_constraint_begins_after_the_reasoning(reasoning: ReasoningFormat, is_special: bool) -> None:
    row, special = BY_NAME["hermes"], (*reasoning.opens, *reasoning.closes) if is_special else ()
    wanted = calls_only(row, strict(SCHEMAS), at_most_one=True)
    begun = Walker(after_reasoning(wanted, reasoning, row, is_open=True, may_open=True), special)
    fresh = Walker(after_reasoning(wanted, reasoning, row, is_open=False, may_open=True), special)
    done = Walker(after_reasoning(wanted, reasoning, row, is_open=False, may_open=False), special)
    call, thought = row.write([("now", {"n": 1})]), f"Hm, {{}}?{reasoning.closes[-1]}\n\n"
    assert (begun.takes(thought + call), begun.takes(call), begun.takes("Hm")) == (True, False, False)
    assert fresh.takes(reasoning.opens[0] + thought + call)
    assert fresh.takes(call)
    assert not fresh.takes(thought + call)
    assert fresh.takes(reasoning.opens[0], is_whole=False)
    assert not any(fresh.takes(space + reasoning.opens[0], is_whole=False) for space in (" ", "\n"))
    assert done.takes(call)
    assert not done.takes(reasoning.opens[0] + thought + call)
    found = read(thought + call, row, SCHEMAS, reasoning, inside=True)
    assert [type(event) for event in found] == [Reasoning, ToolCall]


def test_grammar_prompt_with_the_first_marker_leaves_it_out() -> None:
    formats = choose("functionary_v32", "functionary_v32", None)
    prompt = "<|start_header_id|>assistant<|end_header_id|>\n\n>>>"
    grammar, calls = formats.grammar(prompt), AllowedCalls(strict(SCHEMAS), at_most_one=False)
    written = formats.tools.write([("now", {"n": 1}), ("now", {"n": 2})]) if formats.tools else ""
    answer = written.removeprefix(">>>")
    assert Walker(grammar.calls(calls)).takes(answer)
    assert not Walker(grammar.calls(calls)).takes(written)
    free = Walker(grammar.calls_in_text(calls))
    assert [free.takes(text) for text in (answer, "all\nIt is noon.", f"all\nI look.{written}")] == [True] * 3
    assert Walker(grammar.text_or_calls(fixed("yes"), calls)).takes("all\nyes")
    for text, content in ((answer, ""), (f"all\nI look.{written}", "I look.")):
        reader = formats.reader(prompt, SCHEMAS)
        found = [event for char in text for event in reader.feed(char)] + reader.finish()
        assert "".join(event for event in found if isinstance(event, str)) == content
        assert [event.arguments for event in found if isinstance(event, ToolCall)] == ['{"n": 1}', '{"n": 2}']


UNSAYABLE: list[dict[str, Any]] = [
    {"type": "object", "patternProperties": {"a": {}}},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    {"type": "object", "properties": {"a b": {}}},
    {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "x$y"}}},
    {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}]}}},
    {"anyOf": [{"required": ["a"]}]},
]


@folded("name", ["pythonic", "functiongemma"])
@folded("schema", UNSAYABLE, ids=str)
def test_schema_beyond_a_format_is_refused_by_the_formats_name(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=f"--tool-call-parser {name} cannot be enforced for the function 'f'"
    ):
        calls_only(BY_NAME[name], [AllowedFunction("f", schema, True)], at_most_one=True)


@folded("schema", [one for one in UNSAYABLE if "a b" not in str(one)], ids=str)
def test_schema_beyond_tags_is_refused_by_the_formats_name(schema: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="--tool-call-parser qwen3_coder cannot be enforced"):
        calls_only(BY_NAME["qwen3_coder"], [AllowedFunction("f", schema, True)], at_most_one=True)


@folded("row", ROWS, ids=IDS)
def test_arguments_of_a_lenient_function_may_be_any(row: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    walker = Walker(calls_only(row, [AllowedFunction("f", schema, False)], at_most_one=True))
    assert walker.takes(row.write([("f", {"a": "text"})]))
    assert walker.takes(row.write([("f", {})]))
