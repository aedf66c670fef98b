# SPDX-License-Identifier: Apache-2.0
"""Values written as text between tags (see `TaggedCall`): conversion to JSON by schema, and their constraints.

Invariant: every value that a constraint allows is parsed to one that its schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from quire.entrypoints.chat.formats.constraint import (
    ANNOTATIONS,
    Form,
    Schema,
    UnenforceableError,
    either,
    fixed,
    json_of,
    row,
    until,
    verbatim,
    with_definitions,
)
from quire.entrypoints.chat.formats.python_literals import literal, parse_python
from quire.entrypoints.chat.formats.scanning import ANY, LENGTHS, text_pattern

VALUES = msgspec.json.Decoder(float_hook=str)  # Decoder for numbers of any size, which are passed on as text.

KINDS = ("string", "number", "boolean", "array", "object", "null")  # Types of JSON values.
# First character of a JSON text -> its type; otherwise a number.
KIND_BY_FIRST = {'"': "string", "t": "boolean", "f": "boolean", "[": "array", "{": "object", "n": "null"}
ALTERNATIVES = ("anyOf", "oneOf")
COMBINED = frozenset({"allOf", "not", "if", "then", "else"})  # Keywords that may restrict any value.


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def object_text(fields: Mapping[str, str]) -> str:
    """Return the JSON object of keys and JSON texts of values."""
    return "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in fields.items()) + "}"


def json_kind(value: Any) -> str:
    """Return the type of a value; integers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case Mapping():
            return "object"
    return "array"


def marked_text(schema: Mapping[str, Any], value: str, *, is_text: bool) -> str:
    """Return the JSON text of a value that the model marked as a string or as another type.

    The tool's schema takes precedence over the mark, and the mark over the look of the value.
    """
    kinds = schema_kinds(schema)
    if is_text:
        return typed_text(schema, value) if kinds - {"string"} and "string" not in kinds else to_json(value)
    if kinds and is_json(value):
        kind = KIND_BY_FIRST.get(value.strip()[:1], "number")
        if kind in kinds or (kind == "number" and "integer" in kinds):
            return value.strip()
    return typed_text(schema, value)


def typed_text(schema: Mapping[str, Any], value: str) -> str:
    """Return the JSON text of a value: itself if it is JSON and the schema does not want a string."""
    kinds = schema_kinds(schema)
    if value == "null" and "null" in kinds:
        return value
    if "string" in kinds:
        return to_json(value)
    stripped = value.strip()
    if stripped in ("True", "False", "None"):  # from models that write Python
        stripped = {"True": "true", "False": "false", "None": "null"}[stripped]
    if is_json(stripped):
        return stripped
    if kinds & {"array", "object"}:
        return _from_python(stripped) or to_json(value)
    return to_json(value)


def _from_python(text: str) -> str | None:
    """Return the JSON text of a Python list or dict; None if it is neither."""
    try:
        value = literal(parse_python(text))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # Python can express lone surrogates, which cannot be encoded
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return written if isinstance(value, list | dict) else None


def schema_kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a JSON schema names, alternatives included."""
    kinds: set[str] = set()
    said = schema.get("type")
    kinds.update([said] if isinstance(said, str) else [kind for kind in said or () if isinstance(kind, str)])
    if isinstance(schema.get("enum"), list) and all(isinstance(value, str) for value in schema["enum"]):
        kinds.add("string")
    if isinstance(schema.get("const"), str):
        kinds.add("string")
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, dict):
                kinds |= schema_kinds(option)
    return kinds


def is_json(text: str) -> bool:
    try:
        VALUES.decode(text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def plain(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def unpadded(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


class Tags(NamedTuple):
    """Text around a value.

    Attributes:
        of_text, of_others: end of the key before a string or another value.
        padding: precedes the value's end.
        marked: whether these two distinguish the types.
        quotes: optional delimiters of a string.
    """

    of_text: Form
    of_others: Form
    padding: str
    close: str
    marked: bool = False
    quotes: tuple[str, str] | None = None


def tagged_value(schema: Schema, root: Schema, tags: Tags) -> Form:
    """Match the end of a key, its value, and what closes it.

    Raises:
        UnenforceableError: the schema allows strings that cannot be enforced without quotes.
    """
    kinds = schema_kinds(schema)
    end, gap = fixed(tags.padding + tags.close), tags.padding.replace("\n", r"\n")
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return _listed(schema, tags, end)
    if "string" not in kinds:
        if schema.keys() <= ANNOTATIONS:
            return _anything(tags, gap)
        return row(tags.of_others, json_of(with_definitions(schema, root)), end)
    pattern = _pattern(schema)
    text = row(tags.of_text, until(tags.close, f"(?:{pattern}){gap}"))
    forms = [text, *_quoted(pattern, tags, gap)]
    if "null" in kinds:
        forms.append(row(tags.of_others, fixed("null"), end))
    return either(forms)


def _anything(tags: Tags, gap: str) -> Form:
    text = row(tags.of_text, until(tags.close, ANY + gap))
    if not tags.marked:
        return text
    other = json_of({"type": list(KINDS[1:])})
    return either([text, row(tags.of_others, other, fixed(tags.padding + tags.close))])


def _quoted(pattern: str, tags: Tags, gap: str) -> list[Form]:
    """Match a string between quotes, if the syntax has any."""
    if tags.quotes is None:
        return []
    opening, closing = tags.quotes
    return [row(tags.of_text, fixed(opening), until(closing + tags.padding + tags.close, pattern))]


def _listed(schema: Schema, tags: Tags, end: Form) -> Form:
    others = sorted(schema.keys() - ANNOTATIONS - {"type", "enum", "const"})
    if others:
        raise UnenforceableError(f"the keyword {others[0]} beside enum or const")
    values = schema.get("enum", [schema.get("const")])
    if not values:
        raise UnenforceableError("an enum without values")
    for value in values:
        text = plain(value)
        if tags.close in text or typed_text(schema, text) != to_json(value):
            raise UnenforceableError(f"the value {value!r:.80}, which would be read as another")
    by_kind = [
        (tags.of_text, [verbatim(value) for value in values if isinstance(value, str)]),
        (tags.of_others, [verbatim(plain(value)) for value in values if not isinstance(value, str)]),
    ]
    return row(either([row(begin, either(texts)) for begin, texts in by_kind if texts]), end)


def _pattern(schema: Schema) -> str:
    """Return the pattern of the schema's strings; one of its alternatives may be a string."""
    alternatives = next((schema[key] for key in ALTERNATIVES if isinstance(schema.get(key), list)), None)
    if alternatives is not None:
        others = sorted(schema.keys() - ANNOTATIONS - set(ALTERNATIVES))
        of_text = [option for option in alternatives if "string" in schema_kinds(option)]
        if others or len(of_text) != 1:
            raise UnenforceableError("alternatives of which not exactly one is about strings")
        return _pattern(of_text[0])
    own = {key: value for key, value in schema.items() if key in LENGTHS | {"pattern", "format"}}
    others = sorted(schema.keys() - ANNOTATIONS - LENGTHS - {"type", "pattern", "format"})
    if others and (schema.get("type") == "string" or COMBINED.intersection(others)):
        raise UnenforceableError(f"the keyword {others[0]} of a string")
    return text_pattern(own)
