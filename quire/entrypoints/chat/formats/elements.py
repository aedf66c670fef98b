"""Calls as nested elements, of which each tag stands behind a token of its own, so that values need no escapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import (
    Form,
    Schema,
    UnsayableError,
    arguments_of,
    either,
    fields,
    fixed,
    listed,
    row,
    until,
    verbatim,
)
from quire.entrypoints.chat.formats.ends import End, QuotedEnd
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.literals import Literals
from quire.entrypoints.chat.formats.texts import text_pattern
from quire.entrypoints.chat.formats.typed import object_text, plain, schema_kinds, to_json, typed_text

ITEM = "item"
"""The name of an element that is an item of a list."""
NAME = r"[^\s<>/][^<>]*"
TAG = re.compile(rf"<(/?)({NAME})>(.*)", re.DOTALL)
MAX_DEPTH = 64


@dataclass
class Element:
    """One element while it is read."""

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
        """Return the JSON text of the object of the children; None if a value of theirs is none."""
        properties = part(schema, "properties")
        values = {child.name: child.value(part(properties, child.name)) for child in self.children}
        texts = {name: value for name, value in values.items() if value is not None}
        return object_text(texts) if len(texts) == len(values) else None


def part(schema: Schema, key: str) -> Schema:
    """Return a part of a schema; nothing if there is none that says what it is."""
    found = schema.get(key)
    return found if isinstance(found, Mapping) and "$ref" not in found else {}


@dataclass(frozen=True)
class ElementCall:
    """`<invoke name="f">`, an element for each argument, `</invoke>`; `token` stands before each tag."""

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

    def end(self) -> End:
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
        close = row(fixed(self.token), fixed("</invoke>"))  # in two, since other tags begin as it does
        return row(fixed(self.before), verbatim(name), fixed('">'), body, close)

    def _tree(self, tags: list[str]) -> Element | None:
        """Return the elements that these tags are, each with the text behind it; None if they are none."""
        path = [Element("", "")]
        for tag in tags:
            found = TAG.fullmatch(tag)
            if found is None or len(path) > MAX_DEPTH:
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


class ElementLiterals(Literals):
    """Values and the token behind them, which begins the tag that ends them."""

    words: ClassVar[Mapping[str, tuple[str, ...]]] = {name: (name,) for name in ("true", "false", "null")}
    comma = ""

    def __init__(self, root: Schema, token: str) -> None:
        super().__init__(root)
        self._token = token

    def anything(self) -> Form:
        return until(self._token)

    def any_object(self) -> Form:
        raise UnsayableError("an object without named properties")

    def string(self, schema: Schema) -> Form:
        return until(self._token, text_pattern(schema))

    def key(self, name: str) -> Form:
        if not re.fullmatch(NAME, name):
            raise UnsayableError(f"the name {name!r:.80}")
        return row(fixed(self._token), fixed("<"), verbatim(name), fixed(">"))

    def member(self, name: str, value: Form) -> Form:
        return row(self.key(name), value, fixed("</"), verbatim(name), fixed(">"))

    def spellings(self, value: Any) -> list[Form]:
        if isinstance(value, list | dict):
            raise UnsayableError("an enum of arrays or objects")
        if isinstance(value, str) and self._token in value:
            raise UnsayableError(f"the value {value!r:.80}")
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
