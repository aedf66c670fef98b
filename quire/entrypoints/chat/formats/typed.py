"""Values that are written as text: what JSON a text is, by the schema of its value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.entrypoints.chat.formats.python_literals import literal, parse_python

VALUES = msgspec.json.Decoder(float_hook=str)
"""Of any size: what a number is worth is for the tool to say."""


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def object_text(fields: Mapping[str, str]) -> str:
    """The JSON object of keys and the JSON texts of their values."""
    return "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in fields.items()) + "}"


KINDS = ("string", "number", "boolean", "array", "object", "null")
"""The kinds of JSON values."""
KIND_BY_FIRST = {'"': "string", "t": "boolean", "f": "boolean", "[": "array", "{": "object", "n": "null"}
"""The first character of a JSON text -> its kind; of the others it is a number."""


def json_kind(value: Any) -> str:
    """The kind of a value; integers are numbers."""
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
    """The JSON text of a value that the model marked as a string, or as something else.

    The tool's schema counts for more than the mark, and the mark for more than what the value looks like.
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
    """The JSON text of a value that was written as text: itself if it is JSON, unless the schema wants a string."""
    kinds = schema_kinds(schema)
    if value == "null" and "null" in kinds:
        return value
    if "string" in kinds:
        return to_json(value)
    stripped = value.strip()
    if stripped in ("True", "False", "None"):  # of models that think in Python
        stripped = {"True": "true", "False": "false", "None": "null"}[stripped]
    if is_json(stripped):
        return stripped
    if kinds & {"array", "object"}:
        return _from_python(stripped) or to_json(value)
    return to_json(value)


def _from_python(text: str) -> str | None:
    """The JSON text of a list or an object that is written as Python writes it; None if it is none."""
    try:
        value = literal(parse_python(text))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a character can be written in Python, and not be sent
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return written if isinstance(value, list | dict) else None


def schema_kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names, alternatives included."""
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
