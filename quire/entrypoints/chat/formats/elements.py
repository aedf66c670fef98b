# SPDX-License-Identifier: Apache-2.0
"""Value grammars for languages other than JSON (Python literals, Gemma, XML elements), and calls of nested elements.

Each tag of a nested element follows a special token, so values need no escapes. Invariant: an object has the properties
of its schema in order, and no others; a schema that a language cannot express is an `UnenforceableError`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import (
    ANNOTATIONS,
    Argument,
    Form,
    Schema,
    UnenforceableError,
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
from quire.entrypoints.chat.formats.scanning import CallEnd, QuotedEnd, ToolCall, Tools, text_pattern
from quire.entrypoints.chat.formats.tagged import object_text, plain, schema_kinds, to_json, typed_text

MAX_DEPTH = 16
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
INTEGER = "-?(?:0|[1-9][0-9]{0,17})"
# Range of numbers that every language reads without losing more than digits.
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+-]?[0-9]{{1,2}})?"

OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_OTHERS = OF_STRINGS | BOUNDS  # Keywords without meaning for arrays and objects.
OF_LISTS = frozenset({"items", "minItems", "maxItems"})
OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
KNOWN = ANNOTATIONS | OF_OTHERS | OF_LISTS | OF_OBJECTS | {"type", "enum", "const", "anyOf", "oneOf"}
_HEX = "[0-9a-fA-F]"
# A character's escape, without surrogates.
_BASIC_PLANE = f"u(?:[0-9a-cA-Ce-fE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
_ESCAPES = rf"""\\(?:[\\'"abfnrtv]|x{_HEX}{{2}}|{_BASIC_PLANE}|U00(?:0[1-9a-fA-F]|10){_HEX}{{4}})"""
_PLAIN = {quote: rf"[^{quote}\\\r\n\u{{0}}]" for quote in "'\""}
GEMMA_NAME = r"[^\s\"{}\[\],:<>]+"
GEMMA_KEY = r"[A-Za-z0-9_.\-]{1,64}:"
GEMMA_DEPTH = 2  # Nesting depth of values without a schema.
ITEM = "item"  # Name of the elements that are list items.
NAME = r"[^\s<>/][^<>]*"
TAG = re.compile(rf"<(/?)({NAME})>(.*)", re.DOTALL)
ELEMENTS_MAX_DEPTH = 64


class ValueGrammar(ABC):
    """Base of the value grammars for one function's schema; `root` holds the definitions."""

    words: ClassVar[Mapping[str, tuple[str, ...]]]  # Spellings of true, false and null.
    comma: ClassVar[str]

    def __init__(self, root: Schema) -> None:
        self._root = root

    def form(self, schema: Any, depth: int = 0) -> Form:
        """Return the grammar of a schema's values.

        Raises:
            UnenforceableError: it cannot be expressed.
        """
        if depth > MAX_DEPTH:
            raise UnenforceableError("a schema that is nested too deeply, or holds itself")
        schema = resolved(schema, self._root)
        if schema.keys() <= ANNOTATIONS:
            return self.anything()
        others = sorted(schema.keys() - KNOWN)
        if others:
            raise UnenforceableError(f"the keyword {others[0]}")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, depth)
        if "enum" in schema or "const" in schema:
            return self._values(schema)
        kinds = schema.get("type")
        if kinds is None:
            raise UnenforceableError("a schema without a type")
        return either(
            [self._of(kind, schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        )

    def argument(self, one: Argument, depth: int = 0) -> Form:
        """Return the grammar of a property's values.

        Raises:
            UnenforceableError: it cannot be expressed.
        """
        return self._part(one.schema, depth, "properties", one.name)

    @abstractmethod
    def anything(self) -> Form:
        """Match any value."""

    @abstractmethod
    def string(self, schema: Schema) -> Form:
        """Match a string of this schema."""

    @abstractmethod
    def key(self, name: str) -> Form:
        """Match a property's name and the delimiter before its value."""

    @abstractmethod
    def spellings(self, value: Any) -> list[Form]:
        """Return the spellings of one value."""

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
        raise UnenforceableError(f"the type {kind!r:.80}")

    def _alternatives(self, schema: Schema, keyword: str, depth: int) -> Form:
        others = sorted(schema.keys() - ANNOTATIONS - {keyword})
        options = schema[keyword]
        if others or not isinstance(options, list) or not options:
            raise UnenforceableError(f"the keyword {(others or [keyword])[0]} beside alternatives")
        kinds = [schema_kinds(option) for option in options]
        if keyword == "oneOf" and sum(map(len, kinds)) > len(set().union(*kinds)):
            raise UnenforceableError("the keyword oneOf with alternatives of one type")
        forms = [self._part(option, depth + 1, keyword, str(index)) for index, option in enumerate(options)]
        return either(forms)

    def _values(self, schema: Schema) -> Form:
        others = sorted(schema.keys() - ANNOTATIONS - {"type", "enum", "const"})
        if others or ("enum" in schema and "const" in schema):
            raise UnenforceableError(f"the keyword {(others or ['const'])[0]} beside enum or const")
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise UnenforceableError("an enum without values")
        return either([form for value in values for form in self.spellings(value)])

    def _array(self, schema: Schema, depth: int) -> Form:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is not int or (most is not None and type(most) is not int):
            raise UnenforceableError("minItems or maxItems, which must be integers")
        return self.items(self._part(schema.get("items", {}), depth + 1, "items"), least, most)

    def _object(self, schema: Schema, depth: int) -> Form:
        own = {key: value for key, value in schema.items() if key not in OF_OTHERS | OF_LISTS}
        if not own.keys() & {"properties", "required"} and own.get("additionalProperties") is not False:
            return self.any_object()
        members = arguments_of(own, strict=True)
        forms = [self.member(one.name, self.argument(one, depth + 1)) for one in members]
        return self.members(forms, [one.is_required for one in members])

    def items(self, item: Form, least: int, most: int | None) -> Form:
        """Match an array of `least` to `most` items."""
        return row(fixed("["), listed(item, self.comma, least, most), fixed("]"))

    def member(self, name: str, value: Form) -> Form:
        """Match a property and its value."""
        return row(self.key(name), value)

    def members(self, forms: list[Form], required: list[bool]) -> Form:
        """Match an object of these properties."""
        return row(fixed("{"), fields(forms, required, self.comma), fixed("}"))

    def _part(self, schema: Any, depth: int, *path: str) -> Form:
        with within(*path):
            form = self.form(schema, depth)
        return placed(form, *path)

    @abstractmethod
    def any_object(self) -> Form:
        """Match an object with any properties."""


_NUMBERS = NUMBER.replace("/", r"\/")
PYTHON_VALUES = rf"""
value: STRING | NUMBER | "True" | "False" | "None" | "true" | "false" | "null" | "[" [value (", " value)*] "]" | object
object: "{{" [member (", " member)*] "}}"
member: STRING ": " value
STRING: /'(?:[^'\\\r\n\x00]|{_ESCAPES})*'|"(?:[^"\\\r\n\x00]|{_ESCAPES})*"/
NUMBER: /{_NUMBERS}/
"""


class PythonLiterals(ValueGrammar):
    """Python literals: strings in either kind of quotes, True or true."""

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


class GemmaLiterals(ValueGrammar):
    """JSON with unquoted keys, and strings between two markers."""

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
            raise UnenforceableError(f"the name {name!r:.80}")
        return verbatim(f"{name}:")

    def spellings(self, value: Any) -> list[Form]:
        if isinstance(value, list | dict):
            raise UnenforceableError("an enum of arrays or objects")
        if isinstance(value, str) and self._quote in value:
            raise UnenforceableError(f"the value {value!r:.80}")
        if isinstance(value, str):
            return [row(fixed(self._quote), verbatim(value), fixed(self._quote))]
        return [verbatim(to_json(value))]

    def _any(self, depth: int) -> Form:
        """Match any value with this nesting depth."""
        scalars = [self.string({}), matching(NUMBER), *(fixed(word) for word in ("true", "false", "null"))]
        if not depth:
            return either(scalars)
        inner = self._any(depth - 1)
        array = row(fixed("["), listed(inner, self.comma), fixed("]"))
        return either([*scalars, array, self._any_object(inner)])

    def _any_object(self, value: Form) -> Form:
        return row(fixed("{"), listed(row(matching(GEMMA_KEY), value), self.comma), fixed("}"))


@dataclass
class Element:
    """Element under construction."""

    name: str
    text: str
    children: list[Element] = field(default_factory=list)

    def value(self, schema: Schema) -> str | None:
        """Return the JSON text of the element's value; None if text and elements are mixed."""
        kinds = schema_kinds(schema)
        if not self.children:
            if not self.text.strip() and kinds & {"array", "object"} and "string" not in kinds:
                return "[]" if "array" in kinds else "{}"
            return typed_text(schema, self.text)
        if self.text.strip():
            return None
        if all(child.name == ITEM for child in self.children) and ("array" in kinds or "object" not in kinds):
            items = [child.value(part(schema, "items")) for child in self.children]
            return None if None in items else f"[{', '.join(map(str, items))}]"
        return self.members(schema)

    def members(self, schema: Schema) -> str | None:
        """Return the JSON object of the children; None if one of them is invalid."""
        properties = part(schema, "properties")
        values = {child.name: child.value(part(properties, child.name)) for child in self.children}
        texts = {name: value for name, value in values.items() if value is not None}
        return object_text(texts) if len(texts) == len(values) else None


def part(schema: Schema, key: str) -> Schema:
    """Return a subschema; empty if it is missing or a reference."""
    found = schema.get(key)
    return found if isinstance(found, Mapping) and "$ref" not in found else {}


@dataclass(frozen=True)
class ElementCall:
    """`<invoke name="f">`, an element for each argument, `</invoke>`; `token` precedes each tag."""

    token: str
    needs_marker: ClassVar[bool] = False

    @property
    def before(self) -> str:
        return f'{self.token}<invoke name="'

    @property
    def close(self) -> str:
        return f"{self.token}</invoke>"

    def begins(self, text: str) -> bool | None:
        return text.startswith(self.before) or (None if self.before.startswith(text) else False)

    def end(self) -> CallEnd:
        return QuotedEnd(self.close, "")

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        head, *tags = text.removeprefix(self.before).removesuffix(self.close).split(self.token)
        name = head.strip().removesuffix(">").removesuffix('"')
        root = self._tree(tags)
        if not re.fullmatch(r"[^\s<>\"]+", name) or root is None:
            return None
        arguments = root.members(tools.get(name, {}))
        return ToolCall(name, arguments) if arguments is not None else None

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        written = self._write(arguments) if arguments else ""
        return f'{self.before}{name}">{written}{self.close}'

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments, values = arguments_of(schema, strict=strict), ElementLiterals(schema, self.token)
        items = [values.member(one.name, values.argument(one)) for one in arguments]
        body = fields(items, [one.is_required for one in arguments])
        # as two texts, since other tags have the same beginning
        close = row(fixed(self.token), fixed("</invoke>"))
        return row(fixed(self.before), verbatim(name), fixed('">'), body, close)

    def _tree(self, tags: list[str]) -> Element | None:
        """Return the tree of these tags, each with the text behind it; None if it is malformed."""
        path = [Element("", "")]
        for tag in tags:
            found = TAG.fullmatch(tag)
            if found is None or len(path) > ELEMENTS_MAX_DEPTH:
                return None
            closes, name, text = found.groups()
            if not closes:
                path.append(Element(name, text))
                path[-2].children.append(path[-1])
            elif len(path) < 2 or path.pop().name != name or text.strip():
                return None
        return path[0] if len(path) == 1 else None

    def _write(self, value: Any) -> str:
        if isinstance(value, Mapping | list | tuple) and not value:
            return to_json(value)
        if isinstance(value, Mapping):
            return "".join(self._element(key, item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return "".join(self._element(ITEM, item) for item in value)
        return plain(value)

    def _element(self, name: str, value: Any) -> str:
        return f"{self.token}<{name}>{self._write(value)}{self.token}</{name}>"


class ElementLiterals(ValueGrammar):
    """Value followed by the token that begins its closing tag."""

    words: ClassVar[Mapping[str, tuple[str, ...]]] = {name: (name,) for name in ("true", "false", "null")}
    comma = ""

    def __init__(self, root: Schema, token: str) -> None:
        super().__init__(root)
        self._token = token

    def anything(self) -> Form:
        return until(self._token)

    def any_object(self) -> Form:
        raise UnenforceableError("an object without named properties")

    def string(self, schema: Schema) -> Form:
        return until(self._token, text_pattern(schema))

    def key(self, name: str) -> Form:
        if not re.fullmatch(NAME, name):
            raise UnenforceableError(f"the name {name!r:.80}")
        return row(fixed(self._token), fixed("<"), verbatim(name), fixed(">"))

    def member(self, name: str, value: Form) -> Form:
        return row(self.key(name), value, fixed("</"), verbatim(name), fixed(">"))

    def spellings(self, value: Any) -> list[Form]:
        if isinstance(value, list | dict):
            raise UnenforceableError("an enum of arrays or objects")
        if isinstance(value, str) and self._token in value:
            raise UnenforceableError(f"the value {value!r:.80}")
        return [row(verbatim(plain(value)), fixed(self._token))]

    def _of(self, kind: str, schema: Schema, depth: int) -> Form:
        form = super()._of(kind, schema, depth)
        return form if kind == "string" else row(form, fixed(self._token))

    def items(self, item: Form, least: int, most: int | None) -> Form:
        form = listed(self.member(ITEM, item), "", least, most)
        return form if least else either([form, fixed("[]")])

    def members(self, forms: list[Form], required: list[bool]) -> Form:
        form = fields(forms, required)
        return form if any(required) else either([form, fixed("{}")])
