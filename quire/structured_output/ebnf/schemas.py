# SPDX-License-Identifier: Apache-2.0
"""Normalized JSON schemas in xgrammar's EBNF.

Invariant: the grammar accepts exactly the schema's values, with one spelling of strings and numbers and keys in the
schema's order. What is not supported here is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from quire.json_schema.ecma_regex import IPV4, RegexError
from quire.json_schema.schema import NOT_ENFORCED, VALUES, find, path_of
from quire.structured_output.ebnf.expressions import (
    ALL,
    Rules,
    complement,
    in_json,
    integers,
    of_text,
    quoted,
    refusal,
    string_rule,
)

Schema = dict[str, Any]

SILENT = frozenset({"$schema", "$defs", "definitions", "$anchor"})
"""Keywords without effect on a value."""
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
ARRAYS = frozenset({"prefixItems", "items", "minItems", "maxItems"})
OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
)
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
FORMATS = {"ipv4": IPV4, "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"}
"""Formats left by normalization."""
KEPT = frozenset({"type", "$id", *ALONE}) | SILENT | BOUNDS | STRINGS | ARRAYS | OBJECTS
"""Supported keywords; any other keyword of the standard is refused."""
MAX_STATES = 128  # most states of one string: the library computes a mask for each at compile time
_QUOTE = quoted('"')
NUMBER = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?'


class SchemaWriter:
    """Rules of one document.

    Args:
        space: rule of the whitespace between JSON tokens.

    Raises:
        GrammarError: something in it cannot be enforced.
    """

    def __init__(self, document: Any, rules: Rules, space: str) -> None:
        self._document = document
        self._rules = rules
        self._space = space
        self._comma = rules.define(f'{space} "," {space}')
        self._char = rules.define(in_json(ALL))
        self._any: str | None = None
        self._referred: dict[str, str | None] = {}
        self._writers: dict[str, Callable[[Schema], str | None]] = {
            "null": lambda _: quoted("null"),
            "boolean": lambda _: f"{quoted('true')} | {quoted('false')}",
            "integer": self._integer,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    def rule(self, schema: Any) -> str | None:
        """Return the rule of a schema; None if no value validates."""
        if isinstance(schema, bool):
            return self._anything() if schema else None
        if any(one is False for one in schema.get("allOf", ())):
            return None
        words = schema.keys() & {*VALUES, *NOT_ENFORCED, "const"} - SILENT
        if unknown := words - KEPT:
            raise refusal(min(unknown))
        if "$id" in words and schema is not self._document:
            raise refusal("$id within a schema")
        for word in ALONE:
            if word in words:
                return self._alone(word, schema, words - {word, "$id"})
        return self._by_type(schema) if words - {"$id"} else self._anything()

    def _anything(self) -> str:
        """Return the rule of any value."""
        if self._any is None:
            self._any = self._rules.reserve()
            self._rules.complete(self._any, str(self._by_type({})))
        return self._any

    def _alone(self, word: str, schema: Schema, others: set[str]) -> str | None:
        if word in ("const", "enum"):
            values = schema["enum"] if word == "enum" else [schema["const"]]
            return self._one_of(
                [self._value(one) for one in values if _is_of(schema, one)], word, others - {"type"}
            )
        if word == "$ref":
            return self._one_of([self._follow(schema["$ref"])], word, others)
        if word != "anyOf" and len(schema[word]) > 1:
            raise refusal(f"{word} of several schemas")
        return self._one_of([self.rule(one) for one in schema[word]], word, others)

    def _one_of(
        self, bodies: Sequence[str | None], word: str = "", others: set[str] | None = None
    ) -> str | None:
        """Return the rule of alternatives, without those that no value validates."""
        if others:
            raise refusal(f"{min(others)} beside {word}")
        possible = [body for body in bodies if body is not None]
        return self._rules.define(" | ".join(possible)) if possible else None

    def _by_type(self, schema: Schema) -> str | None:
        kinds = schema.get("type", [kind for kind in self._writers if kind != "integer"])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return self._one_of(
            [self._writers[kind](schema) for kind in kinds if kind != "integer" or "number" not in kinds]
        )

    def _follow(self, reference: str) -> str | None:
        if reference != "#" and not reference.startswith("#/"):
            raise refusal("a $ref that is not a JSON pointer")
        if reference not in self._referred:
            name = self._referred[reference] = self._rules.reserve()
            found = self._referred[reference] = self.rule(find(self._document, path_of(reference)))
            self._rules.complete(name, found or name)  # refers only to itself, which matches nothing
        return self._referred[reference]

    def _integer(self, schema: Schema) -> str | None:
        if schema.get("multipleOf", 1) != 1:
            raise refusal("multipleOf")
        low = [math.ceil(schema[word]) for word in ("minimum",) if word in schema]
        low += [math.floor(schema[word]) + 1 for word in ("exclusiveMinimum",) if word in schema]
        high = [math.floor(schema[word]) for word in ("maximum",) if word in schema]
        high += [math.ceil(schema[word]) - 1 for word in ("exclusiveMaximum",) if word in schema]
        if low and high and max(low) > min(high):
            return None
        return integers(max(low, default=None), min(high, default=None))

    def _number(self, schema: Schema) -> str:
        if words := BOUNDS & schema.keys():
            raise refusal(f"{min(words)} of numbers that may have fractions")
        return NUMBER

    def _string(self, schema: Schema) -> str | None:
        words = STRINGS & schema.keys()
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if most is not None and least > most:
            return None
        if not words & {"pattern", "format"}:
            return f"{_QUOTE} {self._chars(least, most)} {_QUOTE}"
        if len(words) > 1:
            raise refusal(f"{' and '.join(sorted(words))} of one string")
        name = schema.get("format")
        if name is not None and name not in FORMATS:
            raise refusal(f"the format {name}")
        return self._matching(schema["pattern"] if name is None else f"^(?:{FORMATS[name]})$")

    def _chars(self, least: int, most: int | None) -> str:
        """Write that many characters, one rule each: the library's own counters would be expanded at every mask."""
        num_rules = least if most is None else most
        if num_rules > MAX_STATES:
            raise refusal(f"strings of which more than {MAX_STATES} characters are counted")
        tail = f"{self._char}*" if most is None else '""'
        for place in range(num_rules - 1, -1, -1):
            item = f"{in_json(ALL)} {tail}"
            tail = self._rules.define(item if place < least else f'{item} | ""')
        return tail

    def _matching(self, pattern: str) -> str:
        try:
            return f"{_QUOTE} {self._rules.define(string_rule(pattern))} {_QUOTE}"
        except RegexError as error:
            raise refusal(f"the expression: {error}") from None

    def _array(self, schema: Schema) -> str | None:
        prefix = [self.rule(one) for one in schema.get("prefixItems", ())]
        rest = self.rule(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if None in prefix:
            prefix, rest = prefix[: prefix.index(None)], None
        if rest is None:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            return None
        return self._between("[", self._items([one for one in prefix if one][:most], rest, least, most), "]")

    def _items(self, prefix: list[str], rest: str | None, least: int, most: int | None) -> str:
        """Write that many items with whitespace, starting with `prefix`; `rest` is None if there are no others."""
        if not prefix:
            if rest is None or most == 0:
                return '""'
            body = f"{self._space} {rest} {self._repeated(rest, max(least - 1, 0), None if most is None else most - 1)}"
            return body if least else f"({body})?"
        size = len(prefix)
        tail = '""'
        if rest is not None and most != size:
            tail = self._repeated(rest, max(least - size, 0), None if most is None else most - size)
        for place in range(size - 1, 0, -1):
            item = f"{self._comma} {prefix[place]} {tail}"
            tail = self._rules.define(item if place < least else f'{item} | ""')
        body = f"{self._space} {prefix[0]} {tail}"
        return body if least else f"({body})?"

    def _repeated(self, item: str, least: int, most: int | None) -> str:
        return repeated(self._rules.define(f"{self._comma} {item}"), least, most)

    def _between(self, begin: str, body: str, end: str) -> str:
        """Write a body, which starts with whitespace if not empty, to avoid whitespace twice in a row."""
        return f"{quoted(begin)} {body} {self._space} {quoted(end)}"

    def _object(self, schema: Schema) -> str | None:
        if "patternProperties" in schema:
            return self._object_of_names(schema)
        named, required = schema.get("properties", {}), set(schema.get("required", ()))
        others = self.rule(schema.get("additionalProperties", True))
        fields = {name: self.rule(one) for name, one in named.items()}
        fields |= {name: others for name in schema.get("required", ()) if name not in fields}
        if any(fields[name] is None for name in required):
            return None
        other = others and self._member(self._other_name([*fields]), others)
        if not fields:
            return self._members(other, schema)
        if schema.get("minProperties", 0) > len(required) or "maxProperties" in schema:
            raise refusal("minProperties or maxProperties beside properties")
        return self._between("{", self._fields(fields, required, other), "}")

    def _object_of_names(self, schema: Schema) -> str | None:
        ((pattern, value), *more) = schema["patternProperties"].items() or [("", True)]
        if (
            more
            or schema.get("additionalProperties") is not False
            or schema.keys() & {"properties", "required"}
        ):
            raise refusal("patternProperties, but for one pattern of all names")
        rule = self.rule(value)
        return self._members(rule and self._member(self._matching(pattern), rule), schema)

    def _members(self, member: str | None, schema: Schema) -> str | None:
        """Write that many members; a repeated name is one property, so at most one can be required."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if least > 1:
            raise refusal("minProperties above 1")
        if least and (member is None or most == 0):
            return None
        return self._between("{", self._items([], member, least, most), "}")

    def _fields(self, fields: dict[str, str | None], required: set[str], other: str | None) -> str:
        """Write from the end: what may follow after a field, and what at the start."""
        begun = self._repeated(other, 0, None) if other else '""'
        fresh = f"({self._space} {other} {begun})?" if other else '""'
        for name, rule in reversed(fields.items()):
            if rule is None:
                continue
            member = f"{self._member(quoted(json.dumps(name, ensure_ascii=False)), rule)} {begun}"
            first = f"{self._space} {member}"
            fresh = self._rules.define(first if name in required else f"{first} | {fresh}")
            member = f"{self._comma} {member}"
            begun = self._rules.define(member if name in required else f"{member} | {begun}")
        return fresh

    def _member(self, name: str, value: str) -> str:
        return self._rules.define(f'{name} {self._space} ":" {self._space} {value}')

    def _other_name(self, names: list[str]) -> str:
        """Write a string that is none of these: at each character it follows some of them or none."""
        if sum(map(len, names)) > MAX_STATES:
            raise refusal(f"properties beside others, whose names have more than {MAX_STATES} characters")
        return f"{_QUOTE} {self._unlike(names)}"

    def _unlike(self, names: list[str]) -> str:
        """Write what is none of these, up to the closing quote."""
        firsts = sorted({name[0] for name in names if name})
        away = (
            f"{in_json(complement(of_text(firsts)))} {self._char}* {_QUOTE}"
            if firsts
            else f"{self._char}* {_QUOTE}"
        )
        if not firsts:
            return self._rules.define(f"{self._char} {away}" if names else away)
        parts = [away] if "" in names else [away, _QUOTE]
        for first in firsts:
            rest = self._unlike([name[1:] for name in names if name[:1] == first])
            parts.append(f"{in_json(of_text(first))} {rest}")
        return self._rules.define(" | ".join(parts))

    def _value(self, value: Any) -> str:
        if isinstance(value, dict):
            members = [
                self._member(quoted(json.dumps(name, ensure_ascii=False)), self._value(one))
                for name, one in value.items()
            ]
            return self._between("{", self._joined(members), "}")
        if isinstance(value, list):
            return self._between("[", self._joined([*map(self._value, value)]), "]")
        is_whole = isinstance(value, float) and value.is_integer()
        return quoted(json.dumps(int(value) if is_whole else value, ensure_ascii=False))

    def _joined(self, items: list[str]) -> str:
        return f"{self._space} {f' {self._comma} '.join(items)}" if items else ""


def repeated(item: str, least: int, most: int | None) -> str:
    """Return the repetition of an item; `most` None is unlimited."""
    if most is None:
        return f"{item}{{{least},}}" if least else f"{item}*"
    return f"{item}{{{least},{most}}}" if most else '""'


def _is_of(schema: Schema, value: Any) -> bool:
    """Return whether a value is of the schema's type."""
    kinds = schema.get("type", [*_KINDS])
    return any(_KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and int(value) == value,
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
