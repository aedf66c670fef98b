# SPDX-License-Identifier: Apache-2.0
"""Constraints in the EBNF of xgrammar, against Python's words for the same."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.structured_output.backend import Grammar, GrammarBackend, GrammarError
from quire.structured_output.ebnf.expressions import char_set, complement, intersection
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.normalize import normalize
from quire.structured_output.xgrammar_backend import XGrammarBackend
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from tests.fixtures.folded import folded

BYTES = Vocabulary.from_bytes()
backend, guidance = XGrammarBackend(BYTES), GuidanceBackend(BYTES)
bounds = st.none() | st.integers(-1200, 1200)


def compiled(library: GrammarBackend = backend, **fields: Any) -> Grammar:
    return library.compile(normalize(StructuredOutputsParams(**fields), StructuredOutputsSettings()))


def takes(grammar: Grammar, text: str) -> bool:
    matcher = grammar.new_matcher()
    return all(map(matcher.advance, text.encode())) and matcher.may_end


@settings(derandomize=True, max_examples=30, deadline=None)
@given(bounds, bounds)
def test_whole_numbers_are_those_between_their_bounds(low: int | None, high: int | None) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    wanted = [n for n in range(-1300, 1300) if (low is None or n >= low) and (high is None or n <= high)]
    given_bounds = {word: value for word, value in schema.items() if value is not None}
    if not wanted:
        with pytest.raises(GrammarError, match="no value validates"):
            compiled(json=given_bounds)
        return
    grammar = compiled(json=given_bounds)
    assert [n for n in range(-1300, 1300) if takes(grammar, str(n))] == wanted
    assert not any(takes(grammar, text) for text in ("-0", "00", "01", "+1", "", "-"))


@pytest.mark.parametrize("end", [True, False], ids=["from", "to"])
def test_bounds_may_have_many_digits(end: bool) -> None:
    grammar = compiled(json={"type": "integer", "minimum" if end else "maximum": 10**30 + 7})
    for number in (10**30 + 6, 10**30 + 7, 10**30 + 8, 10**31, 0, -(10**40)):
        assert takes(grammar, str(number)) == ((number >= 10**30 + 7) if end else (number <= 10**30 + 7))


names = st.lists(st.text('ab"\\\né', max_size=3), max_size=4, unique=True)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(names, st.text('ab"\\\né', max_size=4))
def test_another_property_has_none_of_the_names(named: list[str], name: str) -> None:
    schema = {
        "properties": dict.fromkeys(named, False),
        "additionalProperties": {"const": 1},
        "type": "object",
    }
    grammar = compiled(json=schema)
    assert takes(grammar, json.dumps({name: 1}, ensure_ascii=False, separators=(",", ":"))) == (
        name not in named
    )


short = st.lists(st.text("ab<", min_size=1, max_size=3), min_size=1, max_size=3, unique=True)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(short, st.sampled_from(["", "a", "<b"]))
def test_free_text_holds_none_of_some_texts(excluded: list[str], not_first: str) -> None:
    grammar = compiled(structural_tag={"type": "any_text", "excludes": excluded, "not_first": not_first})
    for size in range(5):
        for text in map("".join, itertools.product("ab<\n", repeat=size)):
            wanted = not any(one in text for one in excluded)
            if not_first and text.lstrip()[:1] in tuple(not_first):
                wanted = False
            assert takes(grammar, text) == wanted, text


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.text("ab", min_size=1, max_size=3))
def test_text_goes_up_to_the_first_end(end: str) -> None:
    grammar = compiled(structural_tag={"type": "until", "end": end})
    for size in range(6):
        for text in map("".join, itertools.product("abc", repeat=size)):
            assert takes(grammar, text) == (text.endswith(end) and text.index(end) == size - len(end))


ranges = st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 40)), max_size=4)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(ranges, ranges, st.integers(0, 0x10FFFF))
def test_sets_of_characters_are_sets(
    one: list[tuple[int, int]], other: list[tuple[int, int]], code: int
) -> None:
    def holds(found: Any, code: int) -> bool:
        return any(first <= code <= last for first, last in found)

    spans = [[(first, min(first + size, 0x10FFFF)) for first, size in some] for some in (one, other)]
    sets = [char_set(some) for some in spans]
    for at in (code, *(edge for some in spans for span in some for edge in span)):
        is_char = not 0xD800 <= at < 0xE000
        within = [holds(some, at) and is_char for some in spans]
        assert [holds(some, at) for some in sets] == within
        assert holds(complement(sets[0]), at) == (is_char and not within[0])
        assert holds(intersection(*sets), at) == all(within)


SAME_IN_PYTHON = [
    r"[a-c]{2,3}|x?y+z*", r"(?:a|bc)*?d", r"[^a-c]\.", r"\x41\u0042[\x43-\x45]", r"^ab$|c", r"(a(b|)){2}", r"\d{3}-\d",
    r"\s\S", r".", r"[-a][b-]", r"[\]\[^]", r"[\s\d]x", r"a{0}b", "日本|é{2}",
]  # fmt: skip
TEXTS = ["", "abc", "aa", "y", "xyyz", "bcad", "d", "z.", "a.", "ABC", "ABE", "ab", "c", "abab", "aba", "aa", "123-4",
         "١٢٣-٤", " x", "\u3000x", "\n", "\r", "é", "-b", "a-", "^", "]", "7x", "b", "日本", "éé", " \t",
         "\x85a"]  # fmt: skip


@folded("pattern", SAME_IN_PYTHON, ids=ascii)
def test_expression_matches_as_in_python_and_guidance(pattern: str) -> None:
    grammar, other = compiled(regex=pattern), compiled(guidance, regex=pattern)
    for text in TEXTS:
        assert takes(grammar, text) == (re.fullmatch(pattern, text) is not None) == takes(other, text), text


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"regex": pattern}, "the expression: ") for pattern in
      [r"\w", r"(?i:a)",
       r"(?s:.)", r"\bx", r"\p{L}", "a$b", "(^a)", "a**", "[[:alpha:]]", "[a&&b]", "[]", "(",
       "a)", "[a", "a{2,1}", "+", r"\<", "[z-a]", "\\", r"\u{d800}"]),
    ({"grammar": 'start: "a"'}, "grammars of Lark"),
    *(({"grammar": f'root ::= "a" {more}'}, "what it adds to llama.cpp's grammars")
      for more in ("Token(3)", '(= "b")', 'TagDispatch(("a", root))')),
    ({"json": {}, "whitespace_pattern": " *"}, "a whitespace_pattern"),
    ({"structural_tag": {"type": "until", "end": "x", "pattern": "a*"}}, "an expression of the text"),
    ({"structural_tag": {"type": "grammar", "grammar": 'root ::= "a"'}}, "a grammar within"),
    ({"json": {"type": "number", "minimum": 1}}, "minimum of numbers that may have fractions"),
    ({"json": {"minimum": 1}}, "minimum of numbers that may have fractions"),
    ({"json": {"type": "integer", "multipleOf": 3}}, "multipleOf"),
    ({"json": {"type": "string", "pattern": "a", "maxLength": 3}}, "maxLength and pattern of one string"),
    ({"json": {"maxLength": 129}}, "strings of which more than 128 characters"),
    ({"json": {"properties": {"x" * 129: {}}}}, "properties beside others, whose names have more than 128"),
    ({"json": {"type": "string", "format": "uri"}}, "the format uri"),
    ({"json": {"oneOf": [{}, {"type": "null"}]}}, "oneOf of several schemas"),
    ({"json": {"allOf": [{}, {"type": "null"}]}}, "allOf of several schemas"),
    ({"json": {"anyOf": [{}], "minLength": 1}}, "minLength beside anyOf"),
    ({"json": {"enum": [1], "maximum": 0}}, "maximum beside enum"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "null"}}, "type beside $ref"),
    ({"json": {"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}}, "a $ref that is not a JSON pointer"),
    ({"json": {"items": {"$id": "http://x/y"}}}, "$id within a schema"),
    ({"json": {"properties": {"a": {}}, "maxProperties": 1}}, "minProperties or maxProperties beside"),
    ({"json": {"minProperties": 2}}, "minProperties above 1"),
    ({"json": {"patternProperties": {"a": {}}}}, "patternProperties, but for one pattern"),
]  # fmt: skip


@folded(("fields", "reason"), REFUSED, ids=lambda value: ascii(value)[:50])
def test_keyword_unsupported_by_xgrammar_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        GrammarError, match=re.escape(f"the xgrammar backend does not support {reason}")
    ) as error:
        compiled(**fields)
    assert "the guidance backend may" in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [False, {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"minItems": 2, "maxItems": 1,
     "type": "array"}, {"prefixItems": [{}, False], "minItems": 2, "type": "array"}, {"enum": [1], "type": "string"}],
    ids=str,
)  # fmt: skip
def test_a_schema_that_accepts_nothing_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="no value validates"):
        backend.compile(StructuredOutputsParams(json=json.dumps(schema)))


GRAMMARS = [
    ('root ::= "a" [0-9]+ ("," root)?', ["a1", "a12,a3"], ["a", "a1,", "b1", ""]),
    ("root ::= pair*\n# a comment\npair ::= [^\\n\"] \"=\" (\"yes\" | \"no\") \"\\n\"", ["", "é=no\na=yes\n"],
     ["=no\n", "a=no"]),
    ('root ::= "(" root ")" | "" # f(=) Token()', ["", "(())"], ["(", "())"]),
    ('root ::= "x"{2,3} "\\x41" [^\\]"\\x30-9]', ["xxAé", "xxxAé"], ["xAé", "xxxxAé", "xxA]", "xxA7"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS, ids=lambda value: ascii(value)[:30])
def test_llama_cpp_grammar_is_read_alike_by_both_backends(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    prepared = guidance.prepare(StructuredOutputsParams(grammar=grammar))
    for found in (compiled(grammar=grammar), guidance.compile(prepared)):
        assert [text for text in good if not takes(found, text)] == []
        assert [text for text in bad if takes(found, text)] == []


def test_an_end_within_a_text_is_refused() -> None:
    ends = Vocabulary([*BYTES.tokens], {"<end>": 256}, (256,))
    tag = StructuredOutputsParams(structural_tag={"type": "const_string", "value": "a<end>b"})
    with pytest.raises(GrammarError, match="<end> within a text, which it ends"):
        XGrammarBackend(ends).compile(tag)


def test_nothing_is_forced_where_a_special_token_may_come() -> None:
    special = XGrammarBackend(Vocabulary.from_bytes(("[X]",)))
    tag = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("ab", "a[X]")]}
    matcher = special.compile(StructuredOutputsParams(structural_tag=json.dumps(tag))).new_matcher()
    assert matcher.advance(ord("a"))
    assert matcher.forced_tokens() == []
    assert matcher.advance(special.vocabulary.special["[X]"])
    assert matcher.is_complete


def test_a_character_that_is_begun_is_forced_byte_by_byte() -> None:
    matcher = compiled(regex="a(?:é|è)").new_matcher()
    assert matcher.forced_tokens() == [*b"a\xc3"]
    assert all(map(matcher.advance, b"a\xc3"))
    assert matcher.forced_tokens() == []
