"""Values as constraints in languages that write them otherwise than JSON does: Python's literals, and Gemma's.

Invariant: an object has the properties that its schema names, in their order, and no others; what a language cannot say
of a schema is `UnsayableError`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import (
    ANNOTATIONS,
    Argument,
    Form,
    Schema,
    UnsayableError,
    arguments_of,
    either,
    fields,
    fixed,
    json_of,
    listed,
    matching,
    placed,
    resolved,
    row,
    until,
    verbatim,
    within,
)
from quire.entrypoints.chat.formats.texts import text_pattern
from quire.entrypoints.chat.formats.typed import schema_kinds, to_json

MAX_DEPTH = 16
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
INTEGER = "-?(?:0|[1-9][0-9]{0,17})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+-]?[0-9]{{1,2}})?"
"""As far as any language reads them without a loss of more than digits."""


class Literals(ABC):
    """Writes the forms of values of one function's schema, `root`, to whose definitions references lead."""

    words: ClassVar[Mapping[str, tuple[str, ...]]]
    """How true, false and null are written."""
    comma: ClassVar[str]

    def __init__(self, root: Schema) -> None:
        self._root = root

    def form(self, schema: Any, depth: int = 0) -> Form:
        """The form of the values of a schema.

        Raises:
            UnsayableError: there is none.
        """
        if depth > MAX_DEPTH:
            raise UnsayableError("a schema that is nested too deeply, or holds itself")
        schema = resolved(schema, self._root)
        if schema.keys() <= ANNOTATIONS:
            return self.anything()
        others = sorted(schema.keys() - KNOWN)
        if others:
            raise UnsayableError(f"the keyword {others[0]}")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, depth)
        if "enum" in schema or "const" in schema:
            return self._values(schema)
        kinds = schema.get("type")
        if kinds is None:
            raise UnsayableError("a schema without a type")
        return either(
            [self._of(kind, schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        )

    def argument(self, one: Argument, depth: int = 0) -> Form:
        """The form of the values of a property.

        Raises:
            UnsayableError: there is none.
        """
        return self._part(one.schema, depth, "properties", one.name)

    @abstractmethod
    def anything(self) -> Form:
        """Any value."""

    @abstractmethod
    def string(self, schema: Schema) -> Form:
        """A string of a schema."""

    @abstractmethod
    def key(self, name: str) -> Form:
        """The name of a property, and what stands before its value."""

    @abstractmethod
    def spellings(self, value: Any) -> list[Form]:
        """How one value may be written."""

    def _of(self, kind: str, schema: Schema, depth: int) -> Form:
        own = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        match kind:
            case "string":
                return self.string({key: value for key, value in own.items() if key in OF_STRINGS})
            case "integer" | "number":
                bounds = {key: value for key, value in own.items() if key in BOUNDS}
                return (
                    json_of({"type": kind, **bounds})
                    if bounds
                    else matching(INTEGER if kind == "integer" else NUMBER)
                )
            case "boolean":
                return either([fixed(word) for name in ("true", "false") for word in self.words[name]])
            case "null":
                return either([fixed(word) for word in self.words["null"]])
            case "array":
                return self._array(own, depth)
            case "object":
                return self._object(own, depth)
        raise UnsayableError(f"the type {kind!r:.80}")

    def _alternatives(self, schema: Schema, keyword: str, depth: int) -> Form:
        others = sorted(schema.keys() - ANNOTATIONS - {keyword})
        options = schema[keyword]
        if others or not isinstance(options, list) or not options:
            raise UnsayableError(f"the keyword {(others or [keyword])[0]} beside alternatives")
        kinds = [schema_kinds(option) for option in options]
        if keyword == "oneOf" and sum(map(len, kinds)) > len(set().union(*kinds)):
            raise UnsayableError("the keyword oneOf with alternatives of one type")
        forms = [self._part(option, depth + 1, keyword, str(index)) for index, option in enumerate(options)]
        return either(forms)

    def _values(self, schema: Schema) -> Form:
        others = sorted(schema.keys() - ANNOTATIONS - {"type", "enum", "const"})
        if others or ("enum" in schema and "const" in schema):
            raise UnsayableError(f"the keyword {(others or ['const'])[0]} beside enum or const")
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise UnsayableError("an enum without values")
        return either([form for value in values for form in self.spellings(value)])

    def _array(self, schema: Schema, depth: int) -> Form:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is not int or (most is not None and type(most) is not int):
            raise UnsayableError("minItems or maxItems, which must be integers")
        return self.items(self._part(schema.get("items", {}), depth + 1, "items"), least, most)

    def _object(self, schema: Schema, depth: int) -> Form:
        own = {key: value for key, value in schema.items() if key not in OF_OTHERS | OF_LISTS}
        if not own.keys() & {"properties", "required"} and own.get("additionalProperties") is not False:
            return self.any_object()
        members = arguments_of(own, strict=True)
        forms = [self.member(one.name, self.argument(one, depth + 1)) for one in members]
        return self.members(forms, [one.is_required for one in members])

    def items(self, item: Form, least: int, most: int | None) -> Form:
        """An array of so many of these."""
        return row(fixed("["), listed(item, self.comma, least, most), fixed("]"))

    def member(self, name: str, value: Form) -> Form:
        """A property and its value."""
        return row(self.key(name), value)

    def members(self, forms: list[Form], required: list[bool]) -> Form:
        """An object of these properties."""
        return row(fixed("{"), fields(forms, required, self.comma), fixed("}"))

    def _part(self, schema: Any, depth: int, *path: str) -> Form:
        with within(*path):
            form = self.form(schema, depth)
        return placed(form, *path)

    @abstractmethod
    def any_object(self) -> Form:
        """An object with any properties."""


OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_OTHERS = OF_STRINGS | BOUNDS
"""Keywords that say nothing about arrays and objects."""
OF_LISTS = frozenset({"items", "minItems", "maxItems"})
OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
KNOWN = ANNOTATIONS | OF_OTHERS | OF_LISTS | OF_OBJECTS | {"type", "enum", "const", "anyOf", "oneOf"}
_HEX = "[0-9a-fA-F]"
_BASIC_PLANE = f"u(?:[0-9a-cA-Ce-fE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
"""A character by its number, halves of one aside."""
_ESCAPES = rf"""\\(?:[\\'"abfnrtv]|x{_HEX}{{2}}|{_BASIC_PLANE}|U00(?:0[1-9a-fA-F]|10){_HEX}{{4}})"""
_PLAIN = {quote: rf"[^{quote}\\\r\n\u{{0}}]" for quote in "'\""}
_NUMBERS = NUMBER.replace("/", r"\/")
PYTHON_VALUES = rf"""
value: STRING | NUMBER | "True" | "False" | "None" | "true" | "false" | "null" | "[" [value (", " value)*] "]" | object
object: "{{" [member (", " member)*] "}}"
member: STRING ": " value
STRING: /'(?:[^'\\\r\n\x00]|{_ESCAPES})*'|"(?:[^"\\\r\n\x00]|{_ESCAPES})*"/
NUMBER: /{_NUMBERS}/
"""


class PythonLiterals(Literals):
    """Strings in either kind of quotes, True and true."""

    words: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "true": ("True", "true"),
        "false": ("False", "false"),
        "null": ("None", "null"),
    }
    comma = ", "

    def anything(self) -> Form:
        return {"type": "grammar", "grammar": f"start: value{PYTHON_VALUES}"}

    def any_object(self) -> Form:
        return {"type": "grammar", "grammar": f"start: object{PYTHON_VALUES}"}

    def string(self, schema: Schema) -> Form:
        quoted = [f"{quote}{text_pattern(schema, f'{_PLAIN[quote]}|{_ESCAPES}')}{quote}" for quote in "'\""]
        return matching("|".join(quoted))

    def key(self, name: str) -> Form:
        return row(either(self.spellings(name)), fixed(": "))

    def spellings(self, value: Any) -> list[Form]:
        return [verbatim(text) for text in dict.fromkeys([repr(value), to_json(value)])]


GEMMA_NAME = r"[^\s\"{}\[\],:<>]+"
GEMMA_KEY = r"[A-Za-z0-9_.\-]{1,64}:"
GEMMA_DEPTH = 2
"""How deep lists and objects nest of which a schema says nothing."""


class GemmaLiterals(Literals):
    """JSON with bare keys, and strings between two marks."""

    words: ClassVar[Mapping[str, tuple[str, ...]]] = {name: (name,) for name in ("true", "false", "null")}
    comma = ","

    def __init__(self, root: Schema, quote: str) -> None:
        super().__init__(root)
        self._quote = quote

    def anything(self) -> Form:
        return self._any(GEMMA_DEPTH)

    def any_object(self) -> Form:
        return self._any_object(self._any(GEMMA_DEPTH - 1))

    def string(self, schema: Schema) -> Form:
        return row(fixed(self._quote), until(self._quote, text_pattern(schema)))

    def key(self, name: str) -> Form:
        if not re.fullmatch(GEMMA_NAME, name):
            raise UnsayableError(f"the name {name!r:.80}")
        return verbatim(f"{name}:")

    def spellings(self, value: Any) -> list[Form]:
        if isinstance(value, list | dict):
            raise UnsayableError("an enum of arrays or objects")
        if isinstance(value, str) and self._quote in value:
            raise UnsayableError(f"the value {value!r:.80}")
        if isinstance(value, str):
            return [row(fixed(self._quote), verbatim(value), fixed(self._quote))]
        return [verbatim(to_json(value))]

    def _any(self, depth: int) -> Form:
        """Any value in which lists and objects nest so deep."""
        scalars = [self.string({}), matching(NUMBER), *(fixed(word) for word in ("true", "false", "null"))]
        if not depth:
            return either(scalars)
        inner = self._any(depth - 1)
        array = row(fixed("["), listed(inner, self.comma), fixed("]"))
        return either([*scalars, array, self._any_object(inner)])

    def _any_object(self, value: Form) -> Form:
        return row(fixed("{"), listed(row(matching(GEMMA_KEY), value), self.comma), fixed("}"))
