"""How one call is written: where it ends, what it says, and how it would be written.

Each syntax is data: the literals around name and arguments. What is no call of the syntax is None, whatever it is,
since models write anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import msgspec

from quire.entrypoints.chat.formats.constraint import (
    ANY_OBJECT,
    Argument,
    Form,
    Schema,
    UnsayableError,
    arguments_of,
    fields,
    fixed,
    json_of,
    matching,
    placed,
    resolved,
    row,
    verbatim,
    within,
)
from quire.entrypoints.chat.formats.ends import (
    MAX_HEAD_CHARS,
    End,
    HeadedEnd,
    MarkerEnd,
    json_end,
)
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.tagged import tagged_value
from quire.entrypoints.chat.formats.typed import VALUES, object_text, plain, to_json, typed_text, unpadded


class Syntax(Protocol):
    """How one call is written."""

    @property
    def before(self) -> str:
        """What every call begins with; "" if that is nothing by which to know it."""
        ...

    @property
    def needs_marker(self) -> bool:
        """Whether a call looks like any text, so that it can only stand behind a marker."""
        ...

    def begins(self, text: str) -> bool | None:
        """Whether a call begins with this text, which is not empty; None if more of it must be seen."""
        ...

    def end(self) -> End:
        """Finds where a call ends that begins with the next piece."""
        ...

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        """The call that a text is, which begins and ends as one."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        """The text that a model would write; `index` counts the calls of an answer."""
        ...

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        """The calls of a function that can be read, as a piece of a structural tag; `write` makes such texts.

        Args:
            schema: of the arguments; unless `strict`, they are only named by it.

        Raises:
            UnsayableError: what the schema asks for cannot be enforced here.
        """
        ...


@dataclass(frozen=True)
class JsonCall:
    """`{"name": ..., "arguments": {...}}`."""

    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_keys: tuple[str, ...] = ("id",)
    before: ClassVar[str] = ""
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        return text[0] == "{"

    def end(self) -> End:
        return json_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        fields = json_object(text)
        if fields is not None and "function" in fields:  # as in the OpenAI API, around name and arguments
            fields = json_object(bytes(fields["function"]).decode()) or fields
        if fields is None:
            return None
        name = _first(fields, self.name_keys)
        arguments = _first(fields, self.arguments_keys)
        said = _as_string(name) if name is not None else None
        raw = "{}" if arguments is None else _arguments_text(bytes(arguments).decode())
        if not said or raw is None:
            return None
        own_id = _first(fields, self.id_keys)
        return ToolCall(said, raw, _as_string(own_id) if own_id is not None else None)

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        return f'{{"{self.name_keys[0]}": {to_json(name)}, "{self.arguments_keys[0]}": {to_json(arguments)}}}'

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        begin, middle = fixed(f'{{"{self.name_keys[0]}": '), fixed(f', "{self.arguments_keys[0]}": ')
        arguments = json_of({**ANY_OBJECT, **schema} if strict else ANY_OBJECT)
        return row(begin, verbatim(to_json(name)), middle, arguments, fixed("}"))


@dataclass(frozen=True)
class HeadedJson:
    """A head with the name, and the JSON object of the arguments.

    Args:
        before: begins the call.
        head: what stands between that and the object, white space around it aside, with a group `name`, and a group
            `id` if the model numbers its calls.
        written: the same as a model writes it.
    """

    before: str
    head: str
    written: str

    @property
    def needs_marker(self) -> bool:
        return not self.before

    def begins(self, text: str) -> bool | None:
        if self.before:
            return _begins(text, self.before)
        return text[0].isalpha() or text[0] == "_"

    def end(self) -> End:
        return HeadedEnd()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        start = text.find("{")
        if start < 0:
            return None
        found = re.fullmatch(self.head, text[len(self.before) : start].strip())
        arguments = _arguments_text(text[start:])
        if found is None or arguments is None:
            return None
        return ToolCall(found["name"], arguments, found.groupdict().get("id"))

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        return f"{self.before}{self.written.format(name=name, index=index)}{to_json(arguments)}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        before, _, behind = self.written.partition("{name}")
        arguments = json_of({**ANY_OBJECT, **schema} if strict else ANY_OBJECT)
        behind, counts, rest = behind.partition("{index}")
        number = [matching("[0-9]{1,4}")] if counts else []
        return row(
            fixed(self.before + before), verbatim(name), fixed(behind), *number, fixed(rest), arguments
        )


@dataclass(frozen=True)
class TaggedCall:
    """A name, and for each argument its key and its value between literals; values are text.

    A value is a string if the tool's schema says so, or else what JSON makes of it. One line end on either side of it
    belongs to the literals.
    """

    before: str
    name_close: str
    key_open: str
    key_close: str
    value_close: str
    close: str
    padding: str = "\n"
    """What a model writes around values, and between the parts of a call."""
    outer: str = ""
    """Ends the section, and so a call with values whose own end was forgotten."""

    @property
    def needs_marker(self) -> bool:
        return not self.before

    def begins(self, text: str) -> bool | None:
        return _begins(text, self.before) if self.before else text[0].isalpha() or text[0] == "_"

    def end(self) -> End:
        head = _head_of(self.before, self.name_close.strip())
        return MarkerEnd(head, self.close, self.key_open, self.value_close, self.outer)

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        if not text.endswith(self.close) and not (self.outer and text.rstrip().endswith(self.value_close)):
            return None
        body = text[len(self.before) :].removesuffix(self.close)
        start = body.find(self.key_open)
        head, values = (body, "") if start < 0 else (body[:start], body[start:])
        name = head.strip().removesuffix(self.name_close.strip()).strip()
        pairs = self._pairs(values)
        if not name or len(name) > MAX_HEAD_CHARS or re.search(r"[\s<>{}]", name) or pairs is None:
            return None
        schema = tools.get(name, {})
        fields = {key: typed_text(_property(schema, key), value) for key, value in pairs}
        return ToolCall(name, object_text(fields))

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        pad = self.padding
        values = "".join(
            f"{self.key_open}{key}{self.key_close}{pad}{plain(value)}{pad}{self.value_close}{pad}"
            for key, value in arguments.items()
        )
        return f"{self.before}{name}{self.name_close}{pad}{values}{self.close}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        pad, arguments = self.padding, arguments_of(schema, strict=strict)
        values = [self._value(argument, schema) for argument in arguments]
        body = fields(values, [argument.is_required for argument in arguments])
        begin = row(fixed(self.before), verbatim(name), fixed(self.name_close + pad))
        return row(begin, body, fixed(self.close))

    def _value(self, argument: Argument, root: Schema) -> Form:
        with within("properties", argument.name):
            value = tagged_value(argument.schema, root, self.padding, self.value_close)
        value = placed(value, "properties", argument.name)
        begin = row(fixed(self.key_open), verbatim(argument.name), fixed(self.key_close + self.padding))
        return row(begin, value, fixed(self.padding))

    def _pairs(self, text: str) -> list[tuple[str, str]] | None:
        """Key and value of each argument; None if something else stands between them."""
        key_open, value_close = re.escape(self.key_open), re.escape(self.value_close)
        key_close = r"\s*".join(re.escape(part) for part in self.key_close.split())
        one = re.compile(
            rf"\s*{key_open}([^<>]*?){key_close}(.*?){value_close}(?=\s*(?:{key_open}|\Z))", re.DOTALL
        )
        pairs, position = [], 0
        while (found := one.match(text, position)) is not None:
            pairs.append((found[1].strip().strip('"'), unpadded(found[2])))
            position = found.end()
        return pairs if not text[position:].strip() else None


@lru_cache(maxsize=64)
def _head_of(before: str, name_close: str) -> re.Pattern[str]:
    """What stands before a call's first value, or the beginning of it."""
    name = rf"[^\s<>{{}}{re.escape(name_close[:1])}]*"
    return re.compile(rf"{re.escape(before)}\s*{name}\s*{''.join(f'{re.escape(c)}?' for c in name_close)}\s*")


def json_object(text: str) -> dict[str, msgspec.Raw] | None:
    """The fields of a JSON object, each as the model wrote it; None if it is none."""
    try:
        fields = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
        for value in fields.values():
            VALUES.decode(value)  # a raw value has been skipped, and not checked
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return fields


def _property(schema: Schema, key: str) -> Schema:
    """What a schema says of one argument; nothing if it says it in a way that nobody can follow."""
    properties = schema.get("properties")
    try:
        return (
            resolved(properties[key], schema) if isinstance(properties, Mapping) and key in properties else {}
        )
    except UnsayableError:
        return {}


def _first(fields: Mapping[str, msgspec.Raw], keys: tuple[str, ...]) -> msgspec.Raw | None:
    return next((fields[key] for key in keys if key in fields), None)


def _as_string(raw: msgspec.Raw) -> str | None:
    value = msgspec.json.decode(raw)
    return value if isinstance(value, str) else None


def _arguments_text(text: str) -> str | None:
    """The JSON object as the model wrote it, be it inside of a string; None if it is none."""
    if text.startswith('"'):
        text = msgspec.json.decode(text.encode())
    if text.strip() in ("", "null"):
        return "{}"
    return text if json_object(text) is not None else None


def _begins(text: str, literal_text: str) -> bool | None:
    if text.startswith(literal_text):
        return True
    return None if literal_text.startswith(text) else False
