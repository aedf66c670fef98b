"""Values between tags as constraints: what a value's schema allows as text, and as JSON (see `TaggedCall`).

Invariant: a value that is allowed is read back as one that its schema allows.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.entrypoints.chat.formats.constraint import (
    ANNOTATIONS,
    Form,
    Schema,
    UnsayableError,
    either,
    fixed,
    json_of,
    row,
    until,
    verbatim,
    with_definitions,
)
from quire.entrypoints.chat.formats.texts import ANY, LENGTHS, text_pattern
from quire.entrypoints.chat.formats.typed import KINDS, plain, schema_kinds, to_json, typed_text

ALTERNATIVES = ("anyOf", "oneOf")
COMBINED = frozenset({"allOf", "not", "if", "then", "else"})
"""Keywords about any value."""


class Tags(NamedTuple):
    """What stands around a value.

    Attributes:
        of_text, of_others: end the key and open a value, which is a string or something else.
        padding: stands between a value and its end.
        marked: whether the two say which of them the value is.
        quotes: may stand around a string.
    """

    of_text: Form
    of_others: Form
    padding: str
    close: str
    marked: bool = False
    quotes: tuple[str, str] | None = None


def tagged_value(schema: Schema, root: Schema, tags: Tags) -> Form:
    """The end of a key, its value, and what closes that.

    Raises:
        UnsayableError: its schema allows strings, but not by what can be said of a text without quotes.
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
    """A string between quotes, if the syntax has any."""
    if tags.quotes is None:
        return []
    opening, closing = tags.quotes
    return [row(tags.of_text, fixed(opening), until(closing + tags.padding + tags.close, pattern))]


def _listed(schema: Schema, tags: Tags, end: Form) -> Form:
    others = sorted(schema.keys() - ANNOTATIONS - {"type", "enum", "const"})
    if others:
        raise UnsayableError(f"the keyword {others[0]} beside enum or const")
    values = schema.get("enum", [schema.get("const")])
    if not values:
        raise UnsayableError("an enum without values")
    for value in values:
        text = plain(value)
        if tags.close in text or typed_text(schema, text) != to_json(value):
            raise UnsayableError(f"the value {value!r:.80}, which would be read as another")
    by_kind = [
        (tags.of_text, [verbatim(value) for value in values if isinstance(value, str)]),
        (tags.of_others, [verbatim(plain(value)) for value in values if not isinstance(value, str)]),
    ]
    return row(either([row(begin, either(texts)) for begin, texts in by_kind if texts]), end)


def _pattern(schema: Schema) -> str:
    """Of the strings that the schema allows; one of its alternatives may be about strings."""
    alternatives = next((schema[key] for key in ALTERNATIVES if isinstance(schema.get(key), list)), None)
    if alternatives is not None:
        others = sorted(schema.keys() - ANNOTATIONS - set(ALTERNATIVES))
        of_text = [option for option in alternatives if "string" in schema_kinds(option)]
        if others or len(of_text) != 1:
            raise UnsayableError("alternatives of which not exactly one is about strings")
        return _pattern(of_text[0])
    own = {key: value for key, value in schema.items() if key in LENGTHS | {"pattern", "format"}}
    others = sorted(schema.keys() - ANNOTATIONS - LENGTHS - {"type", "pattern", "format"})
    if others and (schema.get("type") == "string" or COMBINED.intersection(others)):
        raise UnsayableError(f"the keyword {others[0]} of a string")
    return text_pattern(own)
