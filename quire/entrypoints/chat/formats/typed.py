"""Values that are written as text: what JSON a text is, by the schema of its value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

VALUES = msgspec.json.Decoder(float_hook=str)
"""Of any size: what a number is worth is for the tool to say."""


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def object_text(fields: Mapping[str, str]) -> str:
    """The JSON object of keys and the JSON texts of their values."""
    return "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in fields.items()) + "}"


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
    return stripped if is_json(stripped) else to_json(value)


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
