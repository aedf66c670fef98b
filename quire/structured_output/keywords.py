"""The keywords of JSON Schema 2020-12: which values they take, and which of them are not enforced.

Invariant: every keyword that the standard defines is in `VALUES`, `NOT_ENFORCED`, or says nothing about a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.structured_output.formats import LIBRARY as LIBRARY_FORMATS

__all__ = ["LIBRARY_FORMATS"]

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
OPENING = frozenset({"additionalProperties", "patternProperties"})
"""Keywords that say what other properties an object may have."""

NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
}
"""Keyword -> the values that ask for nothing. Any other value is refused."""

IDLE_WITHOUT = {
    "if": frozenset({"then", "else"}),
    "then": frozenset({"if"}),
    "else": frozenset({"if"}),
    "minContains": frozenset({"contains"}),
    "maxContains": frozenset({"contains"}),
}
"""Keyword -> those of which it needs one to mean anything."""

_ONE = ("additionalProperties", "items", "additionalItems")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


class Rule(NamedTuple):
    accepts: Callable[[Any], bool]
    words: str


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and int(value) == value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_COUNT = Rule(_is_count, "a whole number that is not negative")
_NUMBER = Rule(_is_number, "a number")
_TEXT = Rule(lambda value: isinstance(value, str), "text")
_SCHEMA = Rule(_is_schema, "a schema: an object, true or false")
_SCHEMAS = Rule(
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
    "a list of at least one schema",
)
_NAMED_SCHEMAS = Rule(
    lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
    "an object of schemas",
)
_NAMES = Rule(
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of names"
)

VALUES: dict[str, Rule] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": Rule(lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id", "$schema"), _TEXT),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _SCHEMA),
    "items": Rule(lambda value: _is_schema(value) or _SCHEMAS.accepts(value), "a schema"),
    **dict.fromkeys(_MANY, _SCHEMAS),
    **dict.fromkeys(_NAMED, _NAMED_SCHEMAS),
    "required": _NAMES,
    "type": Rule(_is_type, f"one or a list of {', '.join(sorted(TYPES))}"),
    "enum": Rule(lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
}


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The schemas in a schema whose keywords have good values, with their places; of names, see `name_pattern`."""
    for word, value in schema.items():
        if word in _NAMED:
            yield from ((inner, (word, name)) for name, inner in value.items())
        elif word in _MANY or (word == "items" and isinstance(value, list)):
            yield from ((inner, (word, str(index))) for index, inner in enumerate(value))
        elif word in _ONE:
            yield value, (word,)


def asks_for_nothing(word: str, schema: dict[str, Any]) -> bool:
    """Whether one of the keywords that are not enforced may be left out without changing what is accepted."""
    if word in IDLE_WITHOUT and not schema.keys() & IDLE_WITHOUT[word]:
        return True
    value = schema[word]
    return any(value == idle and type(value) is type(idle) for idle in NOT_ENFORCED[word])


def name_pattern(names: Any) -> str | None:
    """An expression, as JSON Schema has it, of the names that `propertyNames` allows; None if none is simple."""
    if names is True or names == {}:
        return ""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    rest = names.keys() - {"type", "title", "description", "default", "examples", "$comment"}
    if rest == {"pattern"}:
        return str(names["pattern"])
    values = names["enum"] if rest == {"enum"} else [names["const"]] if rest == {"const"} else None
    if values is None or not all(isinstance(value, str) for value in values):
        return "" if not rest else None
    return f"^(?:{'|'.join(re.escape(value) for value in values)})$"
