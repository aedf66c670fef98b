# SPDX-License-Identifier: Apache-2.0
"""Schemas, expressions and tags as clients send them, to what a backend compiles."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ValidationError
from quire.json_schema.ecma_regex import RegexError, to_rust
from quire.json_schema.schema import NOT_ENFORCED, VALUES
from quire.structured_output.backend import Grammar, GrammarError
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.normalize import normalize
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from tests.fixtures.folded import folded

backend = GuidanceBackend(Vocabulary.from_bytes())
DEFAULT = StructuredOutputsSettings()


def compiled(**fields: Any) -> Grammar:
    return backend.compile(normalize(StructuredOutputsParams(**fields), DEFAULT))


def takes(grammar: Grammar, text: str) -> bool:
    matcher = grammar.new_matcher()
    return all(map(matcher.advance, text.encode())) and matcher.may_end


def refusal(schema: Any) -> str:
    with pytest.raises(ValidationError) as error:
        normalize(StructuredOutputsParams(json=schema), DEFAULT)
    assert error.value.param == "structured_outputs.json"
    return error.value.message.removeprefix("structured_outputs.json ")


REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "at /not: the keyword not is not supported"),
    ({"properties": {"a/b~": {"uniqueItems": True}}}, "at /properties/a~1b~0/uniqueItems: "),
    ({"anyOf": [{}, {"if": {}, "then": {}}]}, "at /anyOf/1/if: "),
    ({"$defs": {"x": {"contains": {}}}}, "at /$defs/x/contains: "),
    ({"type": "strin"}, "at /type: type must be one or a list of array, boolean"),
    ({"type": []}, "at /type: "),
    ({"properties": []}, "at /properties: properties must be an object of schemas"),
    ({"properties": {"a": 1}}, "at /properties: "),
    ({"required": "a"}, "at /required: "),
    ({"anyOf": []}, "at /anyOf: "),
    ({"enum": []}, "at /enum: "),
    ({"minLength": -1}, "at /minLength: "),
    ({"minLength": 1.5}, "at /minLength: "),
    ({"maxItems": True}, "at /maxItems: "),
    ({"multipleOf": 0}, "at /multipleOf: "),
    ({"minimum": "1"}, "at /minimum: "),
    ({"format": "iri"}, "at /format: the format iri is not supported"),
    ({"pattern": "(?=a)"}, "at /pattern: the expression cannot be enforced: "),
    ({"patternProperties": {"(a)\\1": {}}}, "at /patternProperties/(a)\\1: "),
    ({"$ref": "#/a"}, "at /$ref: '#/a' does not exist"),
    ({"$ref": "#x"}, "at /$ref: '#x' is not an $anchor of this schema"),
    ({"$ref": "other.json"}, "at /$ref: 'other.json' is not in this schema, and references are not fetched"),
    ({"properties": {"a": {"$ref": "#/x"}}, "x": {"not": {}}}, "at /x/not: "),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "a"}}, "at /propertyNames: "),
    ({"propertyNames": {"maxLength": 3}}, "at /propertyNames: "),
    ([], "must be"),
    ('{"a": 1, "a": 2}', "is no valid JSON: an object has the key 'a' twice"),
    ("{", "is no valid JSON"),
    ('{"const": NaN}', "is no valid JSON: NaN"),
    ('{"const": 1e999}', "is no valid JSON"),
    ('{"const": "\\ud800"}', "is no valid JSON"),
    ('{"const": ' + "1" * 5000 + "}", "is no valid JSON"),
    (False, "at /: false accepts nothing"),
]


@folded(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_schema_that_cannot_be_kept_to_is_refused_at_its_place(schema: Any, reason: str) -> None:
    assert reason in refusal(schema)


IDLE: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"if": {"not": {}}},
    {"then": {"not": {}}, "else": False},
    {"minContains": 2},
    {"dependentRequired": {}},
    {"unevaluatedProperties": True},
    {"not": False},
    {"propertyNames": True},
    {"format": "int32"},
    {"title": "x", "x-other": {"not": 1}, "nullable": True},
    {"x-guidance": {"lenient": True}},
]


@folded("schema", IDLE, ids=str)
def test_schema_keyword_without_effect_changes_nothing(schema: dict[str, Any]) -> None:
    for text in ('{"a":[1,1]}', "1", '"x"'):
        assert takes(compiled(json=schema), text)


A_ITSELF: dict[str, Any] = {"$defs": {"A": {"$ref": "#/$defs/A"}}}
ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/A", **A_ITSELF},
    {"$ref": "#/$defs/B", "$defs": {"B": {"$ref": "#/$defs/C"}, "C": {"anyOf": [{"$ref": "#/$defs/B"}]}}},
    {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["n"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
    {"allOf": [{"type": "object"}, {"properties": {"n": {"$ref": "#"}}, "required": ["n"]}]},
    {"anyOf": [False, {"$ref": "#"}]},
    {"oneOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    {"$anchor": "a", "type": "object", "properties": {"n": {"$ref": "#a"}}, "required": ["n"]},
    {"type": "object", "properties": {"n": {"type": "object", "properties": {"m": {"$ref": "#/properties/n"}},
     "required": ["m"]}}, "required": ["n"]},
]  # fmt: skip


@folded("schema", ENDLESS, ids=str)
def test_schema_without_finite_values_is_refused(schema: dict[str, Any]) -> None:
    assert "at /: no value matches it" in refusal(schema)


HAS_END: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}, '{"n":{"n":{}}}'),
    ({"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, '{"n":{"n":null}}'),
    ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, '{"n":5}'),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, "[[1],2]"),
    ({"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
     '{"n":{"n":null}}'),
    ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1, "items": False}, "[1]"),
]  # fmt: skip


@folded(("schema", "text"), HAS_END, ids=lambda value: str(value)[:60])
def test_recursive_schema_with_finite_values_is_kept(schema: dict[str, Any], text: str) -> None:
    assert takes(compiled(json=schema), text)


def test_property_without_finite_values_is_never_begun() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"type": "integer"}},
        **A_ITSELF,
    }
    grammar = compiled(json={**schema, "additionalProperties": False})
    assert takes(grammar, '{"y":1}')
    matcher = grammar.new_matcher()
    assert not all(map(matcher.advance, b'{"x'))


def test_references_of_a_large_document_are_followed() -> None:
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": "#"}]} for i in range(1, 900)}
    last = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    assert "no value matches it" in refusal({"$ref": "#/$defs/d899", "$defs": {**links, "d0": last}})
    normalize(StructuredOutputsParams(json={"$ref": "#/$defs/d899", "$defs": {**links, "d0": {}}}), DEFAULT)


def test_property_names_are_a_pattern() -> None:
    grammar = compiled(
        json={"propertyNames": {"enum": ["a.b", "c"]}, "additionalProperties": {"type": "integer"}}
    )
    assert takes(grammar, '{"a.b":1,"c":2}')
    assert not takes(grammar, '{"axb":1}')
    assert not takes(grammar, '{"c":"x"}')


def test_objects_can_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {}}}}}
    for options in ({"disable_additional_properties": True}, {}):
        grammar = compiled(json=schema, **options)
        assert takes(grammar, '{"x":1}') is (not options)
        assert takes(grammar, '{"a":{"b":1,"x":1}}') is (not options)
        assert takes(grammar, '{"a":{"b":1}}')


def test_white_space_is_as_requested() -> None:
    spaced = '{\n    "a": [1, 2]\n}'
    assert takes(compiled(json_object=True), spaced)
    assert takes(compiled(json_object=True), '{"a":1}')
    assert not takes(compiled(json_object=True), '{  "a":1}')
    assert not takes(compiled(json_object=True, disable_any_whitespace=True), spaced)
    assert takes(compiled(json_object=True, whitespace_pattern="[ \t]{0,3}"), '{   "a" :1}')


@folded("text", ["1", '"x"', "[]", '{"a":1', "{} x", '{"a":01}', '{"a":"\n"}', "{a:1}"])
def test_text_that_is_no_json_object_is_rejected(text: str) -> None:
    assert not takes(compiled(json_object=True), text)


SAME_IN_ECMA_AND_HERE = [
    (r"^\d+$", ["1", "12", "", "x", "٣"]),
    (r"a.c", ["abc", "a\nc", "a\rc", "a\u2028c", "xabcx"]),
    (r"^[^]$", ["a", "\n", "ab"]),
    (r"^[\s\d-]+$", ["1 -", "\ufeff", "\x85", "x"]),
    (r"^\S$", ["a", "\ufeff", "\x85", " "]),
    (r"^[a&&b]$", ["a", "&", "b", "c"]),
    (r"^[[a]$", ["[", "a", "]"]),
    (r"^[a\-c]$", ["a", "-", "b"]),
    (r"^[+--]$", ["+", ",", "-", "."]),
    (r"^[\b]$", ["\b", "b"]),
    (r"^\cJ\x41\u0042\u{1F600}\ud83d\ude00$", ["\nAB\U0001f600\U0001f600"]),
    (r"^(?<year>\d{4})(?:-|/)\d{1,2}?$", ["2024-1", "2024/12", "2024.1"]),
    (r"^\/\-\_?$".replace(r"\_", "_"), ["/-", "/-_", "\\/-"]),
    (r"^]}$", ["]}", "x"]),
    (r"^(a|b)*c{2,}$", ["cc", "abccc", "c"]),
]  # fmt: skip


def ecma_matches(pattern: str, text: str) -> bool:
    """By Python's engine, in which these patterns mean the same once what differs is written out."""
    white = r"\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    changes = {
        r"[\s\d-]": rf"[{white}0-9\-]", r"\S": f"[^{white}]", r"\d": "[0-9]", "[^]": r"(?s:.)",
        "[[a]": r"[\[a]", "[a&&b]": r"[a&b]", "[+--]": r"[+,\-]", "a.c": r"a[^\n\r\u2028\u2029]c",
        r"\cJ": r"\n", r"\u{1F600}": "\U0001f600", r"\ud83d\ude00": "\U0001f600", "(?<year>": "(?:",
    }  # fmt: skip
    for old, new in changes.items():
        pattern = pattern.replace(old, new)
    return re.search(re.sub(r"\$$", r"\\Z", pattern), text) is not None


@folded(("pattern", "texts"), SAME_IN_ECMA_AND_HERE, ids=lambda value: ascii(value)[:40])
def test_an_expression_of_a_schema_is_read_as_ecma_has_it(pattern: str, texts: list[str]) -> None:
    grammar = compiled(json={"type": "string", "pattern": pattern})
    for text in texts:
        written = json.dumps(text, ensure_ascii=False)
        assert takes(grammar, written) == ecma_matches(pattern, text), text


@folded(
    "pattern",
    [r"(?=a)", r"(?!a)", r"(?<=a)", r"(?i)a", r"(?i:a)", r"\bx", r"\B", r"(a)\1", r"\k<a>", "[]", "a{", "{1}{,2}",
     r"\a", r"\z", r"\A", r"\u{110000}", r"\ud800", r"\ud800\u0041", "[a", "\\", r"\01", r"\Q", "(?P<a>b)", r"\c1"],
)  # fmt: skip
def test_untranslatable_regex_is_refused(pattern: str) -> None:
    with pytest.raises((RegexError, GrammarError)):
        backend.compile(StructuredOutputsParams(regex=to_rust(pattern)))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text("ab[](){}^$.|*+?\\-&,01dsSu<>:=!\n", max_size=12))
def test_no_expression_breaks_the_reader(pattern: str) -> None:
    with contextlib.suppress(RegexError, GrammarError):
        backend.compile(StructuredOutputsParams(regex=to_rust(pattern)))


WORDS = [*VALUES, *NOT_ENFORCED, "const", "title", "unheard of"]
json_values = st.recursive(
    st.sampled_from(
        [None, True, 0, -1, 2.5, 3, "", "a", "#/$defs/a", "#", "date", "object", "string", ["a"], {}, []]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*WORDS, "a"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(WORDS), json_values, max_size=4))
def test_any_schema_is_refused_or_compiled(schema: dict[str, Any]) -> None:
    with contextlib.suppress(ValidationError, GrammarError):
        takes(compiled(json=schema), '{"a":[1]}')


TAGS: list[tuple[Any, str]] = [
    ([], "must be"),
    ({"type": "tag"}, "at /begin: must be text"),
    ({"type": "other"}, "at /: a format must be an object whose type is one of const_string"),
    ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}},
     "at /format/json_schema/not: "),
    ({"type": "sequence", "elements": []}, "at /elements: "),
    ({"type": "sequence", "elements": [{"type": "regex"}]}, "at /elements/0/pattern: must be text"),
    ({"type": "structural_tag", "structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}, "with no trigger"),
    ({"type": "triggered_tags", "triggers": ["a"], "tags": [{"begin": "a", "end": "", "content": {"type": "any_text"}}],
      "at_least_one": 1}, "at /at_least_one: must be true or false"),
]  # fmt: skip


@folded(("tag", "reason"), TAGS, ids=lambda value: str(value)[:40])
def test_a_tag_of_another_shape_is_refused_at_its_place(tag: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        normalize(StructuredOutputsParams(structural_tag=tag), DEFAULT)


def tag(begin: str, end: str = "") -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": {"enum": [1]}},
        "end": end,
    }


TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (tag("<a>", "</a>"), ["<a>1</a>"], ["<a>2</a>", "1", "<a>1</a> "]),
    ({"type": "tags_with_separator", "tags": [tag("a"), tag("b")], "separator": ",", "at_least_one": True},
     ["a1", "b1,a1,a1"], ["", "a1,", "a1b1"]),
    ({"type": "tags_with_separator", "tags": [tag("a")], "separator": ",", "stop_after_first": True},
     ["", "a1"], ["a1,a1"]),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", "</a>")]},
     ["", "free", "x <a>1</a> y <a>1</a>", "a > b"], ["<", "x <b>", "<a>2</a>"]),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>")], "at_least_one": True,
      "stop_after_first": True},
     ["<a>1", "x<a>1"], ["", "x", "<a>1 y"]),
    ({"type": "or", "elements": [{"type": "regex", "pattern": "a+/"}, {"type": "grammar", "grammar": 'start: "b"'}]},
     ["aa/", "b"], ["", "ab"]),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": 'q"\\\n'}, {"type": "any_text"}]},
     ['q"\\\n', 'q"\\\nx\n"'], ["q"]),
]  # fmt: skip


@folded(("wanted", "good", "bad"), TAKEN, ids=lambda value: str(value)[:40])
def test_a_tag_takes_its_texts_and_no_others(wanted: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = compiled(structural_tag=wanted)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


@pytest.mark.parametrize("name", ["<|call|>", "[CALLS]", "</s >", "a b"])
def test_a_special_token_in_a_tag_is_that_token(name: str) -> None:
    special = GuidanceBackend(Vocabulary.from_bytes((name,)))
    wanted = normalize(StructuredOutputsParams(structural_tag=tag(f"{name}x")), DEFAULT)
    matcher = special.compile(wanted).new_matcher()
    assert not matcher.advance(ord(name[0]))
    assert matcher.advance(special.vocabulary.special[name])
    assert all(map(matcher.advance, b"x1"))
    assert matcher.is_complete


def test_a_special_token_can_be_a_trigger() -> None:
    special = GuidanceBackend(Vocabulary.from_bytes(("[CALLS]",)))
    fields = {"type": "triggered_tags", "triggers": ["[CALLS]"], "tags": [tag("[CALLS]x")]}
    matcher = special.compile(
        normalize(StructuredOutputsParams(structural_tag=fields), DEFAULT)
    ).new_matcher()
    assert all(map(matcher.advance, b"free [CALLS"))
    assert not matcher.advance(ord("]"))  # spelled in letters it would be no call, and look like one
    assert matcher.may_end
    assert matcher.advance(special.vocabulary.special["[CALLS]"])
    assert not matcher.may_end
    assert not matcher.advance(ord("y"))
    assert all(map(matcher.advance, b"x1"))
    assert matcher.may_end
