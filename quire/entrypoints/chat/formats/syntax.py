"""How one call is written: where it ends, what it says, and how it would be written.

Each syntax is data: the literals around name and arguments. What is no call of the syntax is None, whatever it is,
since models write anything. Nothing here is stronger than a JSON parser: Python's own reads calls in Python, and only
literals are taken from what it gives.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from quire.entrypoints.chat.formats.constraint import (
    ANY_OBJECT,
    Form,
    Schema,
    UnsayableError,
    arguments_of,
    fields,
    fixed,
    json_of,
    resolved,
    row,
    verbatim,
)
from quire.entrypoints.chat.formats.ends import (
    MAX_HEAD_CHARS,
    End,
    HeadedEnd,
    MarkerEnd,
    json_end,
    python_end,
)
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.literals import PythonLiterals
from quire.entrypoints.chat.formats.tagged import tagged_value
from quire.entrypoints.chat.formats.typed import VALUES, object_text, plain, to_json, typed_text, unpadded

JSON_NAMES = {"true": True, "false": False, "null": None}


class Syntax(Protocol):
    """How one call is written."""

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

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text that a model would write."""
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
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        return text[0] == "{"

    def end(self) -> End:
        return json_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        fields = json_object(text)
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

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
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

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.before}{self.written.format(name=name)}{to_json(arguments)}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        before, _, behind = self.written.partition("{name}")
        arguments = json_of({**ANY_OBJECT, **schema} if strict else ANY_OBJECT)
        return row(fixed(self.before + before), verbatim(name), fixed(behind), arguments)


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

    @property
    def needs_marker(self) -> bool:
        return not self.before

    def begins(self, text: str) -> bool | None:
        return _begins(text, self.before) if self.before else text[0].isalpha() or text[0] == "_"

    def end(self) -> End:
        return MarkerEnd(self.close, self.key_open, self.value_close)

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        body = text[len(self.before) : len(text) - len(self.close)]
        start = body.find(self.key_open)
        head, values = (body, "") if start < 0 else (body[:start], body[start:])
        name = head.strip().removesuffix(self.name_close.strip()).strip()
        pairs = self._pairs(values)
        if not name or len(name) > MAX_HEAD_CHARS or re.search(r"[\s<>{}]", name) or pairs is None:
            return None
        schema = tools.get(name, {})
        fields = {key: typed_text(_property(schema, key), value) for key, value in pairs}
        return ToolCall(name, object_text(fields))

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        pad = self.padding
        values = "".join(
            f"{self.key_open}{key}{self.key_close}{pad}{plain(value)}{pad}{self.value_close}{pad}"
            for key, value in arguments.items()
        )
        return f"{self.before}{name}{self.name_close}{pad}{values}{self.close}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        pad, arguments = self.padding, arguments_of(schema, strict=strict)
        values = [
            row(
                fixed(self.key_open),
                verbatim(argument.name),
                fixed(self.key_close + pad),
                tagged_value(argument.schema, schema, pad, self.value_close),
                fixed(pad),
            )
            for argument in arguments
        ]
        body = fields(values, [argument.is_required for argument in arguments])
        begin = row(fixed(self.before), verbatim(name), fixed(self.name_close + pad))
        return row(begin, body, fixed(self.close))

    def _pairs(self, text: str) -> list[tuple[str, str]] | None:
        """Key and value of each argument; None if something else stands between them."""
        key_open, value_close = re.escape(self.key_open), re.escape(self.value_close)
        key_close = r"\s*".join(re.escape(part) for part in self.key_close.split())
        one = re.compile(
            rf"\s*{key_open}([^<>]*?){key_close}(.*?){value_close}(?=\s*(?:{key_open}|\Z))", re.DOTALL
        )
        pairs, position = [], 0
        while text[position:].strip():
            found = one.match(text, position)
            if found is None:
                return None
            pairs.append((found[1].strip().strip('"'), unpadded(found[2])))
            position = found.end()
        return pairs


@dataclass(frozen=True)
class PythonCall:
    """`name(key=value, ...)`, values being Python's or JSON's literals."""

    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        found = re.match(r"[A-Za-z_][\w.\-]*\s*", text)
        if found is None:
            return False
        if found.end() < len(text):
            return text[found.end()] == "("
        return None if len(text) <= MAX_HEAD_CHARS else False

    def end(self) -> End:
        return python_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        name, _, rest = text.partition("(")
        try:
            call = ast.parse(f"_({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            fields = {str(word.arg): literal(word.value) for word in call.keywords if word.arg is not None}
            if len(fields) != len(call.keywords):
                return None
            return ToolCall(name.strip(), json.dumps(fields, ensure_ascii=False, allow_nan=False))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments, values = arguments_of(schema, strict=strict), PythonLiterals(schema)
        words = [row(verbatim(f"{one.name}="), values.form(one.schema)) for one in arguments]
        body = fields(words, [one.is_required for one in arguments], ", ")
        return row(verbatim(f"{name}("), body, fixed(")"))


def literal(node: ast.expr) -> Any:
    """The value of a literal of Python or JSON.

    Raises:
        ValueError: it is something else.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise ValueError("no string")


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
