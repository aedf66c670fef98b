"""Values between tags as constraints: what a value's schema allows as text, and as JSON (see `TaggedCall`).

Invariant: a value that is allowed is read back as one that its schema allows.
"""

from __future__ import annotations

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
from quire.entrypoints.chat.formats.typed import plain, schema_kinds, to_json, typed_text, unpadded

ALTERNATIVES = ("anyOf", "oneOf")
COMBINED = frozenset({"allOf", "not", "if", "then", "else"})
"""Keywords about any value."""
INNER = r"[^\n]"
"""Where nothing is around a value, a line end at its edge is taken for the tag's."""


def tagged_value(schema: Schema, root: Schema, padding: str, close: str) -> Form:
    """A value, and what closes it.

    Raises:
        UnsayableError: its schema allows strings, but not by what can be said of a text without quotes.
    """
    kinds = schema_kinds(schema)
    end, gap = fixed(padding + close), padding.replace("\n", r"\n")
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return _listed(schema, close, end, is_padded=bool(padding))
    if "string" not in kinds:
        if schema.keys() <= ANNOTATIONS:
            return until(close, ANY + gap)
        return row(json_of(with_definitions(schema, root)), end)
    pattern = _pattern(schema, is_padded=bool(padding))
    text = until(close, f"(?:{pattern}){gap}")
    return either([text, row(fixed("null"), end)]) if "null" in kinds else text


def _listed(schema: Schema, close: str, end: Form, *, is_padded: bool) -> Form:
    others = sorted(schema.keys() - ANNOTATIONS - {"type", "enum", "const"})
    if others:
        raise UnsayableError(f"the keyword {others[0]} beside enum or const")
    values = schema.get("enum", [schema.get("const")])
    for value in values:
        text = plain(value)
        if close in text or typed_text(schema, text if is_padded else unpadded(text)) != to_json(value):
            raise UnsayableError(f"the value {value!r:.80}, which would be read as another")
    return row(either([verbatim(plain(value)) for value in values]), end)


def _pattern(schema: Schema, *, is_padded: bool) -> str:
    """Of the strings that the schema allows; one of its alternatives may be about strings."""
    alternatives = next((schema[key] for key in ALTERNATIVES if isinstance(schema.get(key), list)), None)
    if alternatives is not None:
        others = sorted(schema.keys() - ANNOTATIONS - set(ALTERNATIVES))
        of_text = [option for option in alternatives if "string" in schema_kinds(option)]
        if others or len(of_text) != 1:
            raise UnsayableError("alternatives of which not exactly one is about strings")
        return _pattern(of_text[0], is_padded=is_padded)
    own = {key: value for key, value in schema.items() if key in LENGTHS | {"pattern", "format"}}
    others = sorted(schema.keys() - ANNOTATIONS - LENGTHS - {"type", "pattern", "format"})
    if others and (schema.get("type") == "string" or COMBINED.intersection(others)):
        raise UnsayableError(f"the keyword {others[0]} of a string")
    if is_padded or "minLength" not in own:
        return text_pattern(own)
    return _without_edges(own)


def _without_edges(schema: Schema) -> str:
    """Strings of at least so many characters that neither begin nor end with a line end."""
    least, most = schema["minLength"], schema.get("maxLength")
    if schema.keys() - LENGTHS or type(least) is not int or type(most) not in (int, type(None)):
        raise UnsayableError("lengths of a string beside a pattern")
    if least < 2 and (most is None or most > 1):
        more = "" if most is None else most - 2
        one = f"{INNER}(?:(?s:.){{0,{more}}}{INNER})?"
        return one if least else f"(?:{one})?"
    if least >= 2:
        more = "" if most is None else most - 2
        return f"{INNER}(?s:.){{{least - 2},{more}}}{INNER}"
    return INNER if least else f"{INNER}{{0,{most}}}"
