"""How one call is written: where it ends, what it says, and how it would be written.

Each syntax is data: the literals around name and arguments. What is no call of the syntax is None, whatever it is,
since models write anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from quire.entrypoints.chat.formats.constraint import (
    ANY_OBJECT,
    Argument,
    Form,
    Schema,
    UnsayableError,
    arguments_of,
    either,
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
    MAX_SPACE,
    End,
    HeadedEnd,
    MarkerEnd,
    json_end,
)
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.tagged import Tags, tagged_value
from quire.entrypoints.chat.formats.typed import (
    KINDS,
    VALUES,
    json_kind,
    marked_text,
    object_text,
    plain,
    to_json,
    typed_text,
    unpadded,
)


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


@runtime_checkable
class BareSyntax(Protocol):
    """A way to write calls that may stand at the beginning of an answer without a marker."""

    def may_begin(self, text: str, tools: Tools) -> bool:
        """Tell whether this text, which is cut off, can be the beginning of a call of one of the tools."""
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

    def may_begin(self, text: str, tools: Tools) -> bool:
        first = re.match(r'\{\s*"([^"]*)("?)', text)
        keys = (*self.name_keys, *self.arguments_keys, *self.id_keys, "type", "function")
        if first is not None and not is_begun(first[1], keys, is_whole=bool(first[2])):
            return False
        named = re.search(rf'"(?:{"|".join(map(re.escape, self.name_keys))})"\s*:\s*"([^"]*)("?)', text)
        return named is None or is_begun(named[1], tools, is_whole=bool(named[2]))

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
        arguments = json_of({**schema, **ANY_OBJECT} if strict else ANY_OBJECT)
        return row(begin, verbatim(to_json(name)), middle, arguments, fixed("}"))


@dataclass(frozen=True)
class NamedJson:
    """`{"name of the function": {...}}`."""

    before: ClassVar[str] = ""
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        return text[0] == "{"

    def end(self) -> End:
        return json_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        fields = json_object(text)
        if fields is None or len(fields) != 1:
            return None
        ((name, arguments),) = fields.items()
        raw = _arguments_text(bytes(arguments).decode())
        return ToolCall(name, raw) if name and raw is not None else None

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        return f"{{{to_json(name)}: {to_json(arguments)}}}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments = json_of({**schema, **ANY_OBJECT} if strict else ANY_OBJECT)
        return row(fixed("{"), verbatim(to_json(name)), fixed(": "), arguments, fixed("}"))


@dataclass(frozen=True)
class HeadedJson:
    """A head with the name, and the JSON object of the arguments.

    Args:
        before: begins the call.
        head: what stands between that and the object, white space around it aside, with a group `name`, and a group
            `id` if the model numbers its calls.
        written: the same as a model writes it, with `{name}`, and `{index}` or `{id}` if calls have one.
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
        return ToolCall(found["name"], arguments, found.groupdict().get("id") or None)

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        head = self.written.format(name=name, index=index, id=f"call{index:06d}")
        return f"{self.before}{head}{to_json(arguments)}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments = json_of({**schema, **ANY_OBJECT} if strict else ANY_OBJECT)
        return row(fixed(self.before), *numbered(self.written, name), arguments)


class LineCall(HeadedJson):
    """A line with the name, and the JSON object of the arguments; text that begins otherwise is no call."""

    def begins(self, text: str) -> bool | None:
        found = LINE_HEAD.match(text)
        if found is None:
            return False
        if found.end() < len(text):
            return text[found.end()] == "{" and "\n" in found["space"]
        return None if len(found["space"]) < MAX_SPACE else False

    def may_begin(self, text: str, tools: Tools) -> bool:
        found = re.match(r"([\w\-]*)(\s*)(.?)", text)
        assert found is not None, "all parts may be empty"
        return found[3] in ("", "{") and is_begun(found[1], tools, is_whole=bool(found[2]))


LINE_HEAD = re.compile(r"[A-Za-z_][\w\-]{0,63}(?P<space>\s*)")


@dataclass(frozen=True)
class TaggedCall:
    """A name, and for each argument its key and its value between literals; values are text.

    A value is a string if the tool's schema says so, or else what JSON makes of it. With padding, one line end on
    either side of it belongs to the literals.

    Args:
        name_close: ends the name; it may hold `{index}`, the number of the call.
        key_close: ends the key; it may hold `{mark}`, the kind of the value.
        padding: written on either side of a value.
        gap: written between the parts of a call.
        outer: ends the section, and so a call with values whose own end was forgotten.
        marks: how `key_close` names strings, and then other values; of six, those of `KINDS` in their order.
        quotes: may stand around a string that holds markup.
        index_from: the number of the first call.
    """

    before: str
    name_close: str
    key_open: str
    key_close: str
    value_close: str
    close: str
    padding: str = "\n"
    gap: str = "\n"
    outer: str = ""
    marks: tuple[str, ...] = ()
    quotes: tuple[str, str] | None = None
    index_from: int = 0

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
        name = re.sub(rf"(?:{_pattern(self.name_close.strip())})?\Z", "", head.strip(), count=1).strip()
        pairs = self._pairs(values)
        if not name or len(name) > MAX_HEAD_CHARS or re.search(r"[\s<>{}]", name) or pairs is None:
            return None
        schema = tools.get(name, {})
        fields = {key: self._typed(_property(schema, key), mark, value) for key, mark, value in pairs}
        return ToolCall(name, object_text(fields))

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        pad, head = self.padding, self.name_close.replace("{index}", str(self.index_from + index))
        values = "".join(
            f"{self.key_open}{key}{self._key_close(value)}{pad}{self._quoted(value)}{pad}{self.value_close}{self.gap}"
            for key, value in arguments.items()
        )
        return f"{self.before}{name}{head}{self.gap}{values}{self.close}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments = arguments_of(schema, strict=strict)
        values = [self._value(argument, schema) for argument in arguments]
        body = fields(values, [argument.is_required for argument in arguments])
        head = numbered(f"{{name}}{self.name_close}{self.gap}", name)
        return row(fixed(self.before), *head, body, fixed(self.close))

    def _value(self, argument: Argument, root: Schema) -> Form:
        of_text, of_others = self._opens(self.marks[:1]), self._opens(self.marks[1:])
        tags = Tags(of_text, of_others, self.padding, self.value_close, bool(self.marks), self.quotes)
        with within("properties", argument.name):
            value = tagged_value(argument.schema, root, tags)
        value = placed(value, "properties", argument.name)
        return row(fixed(self.key_open), verbatim(argument.name), value, fixed(self.gap))

    def _opens(self, marks: tuple[str, ...]) -> Form:
        """Ends the key of a value that is marked as one of these."""
        closes = [self.key_close.replace("{mark}", mark) for mark in marks or ("",)]
        return either([fixed(close + self.padding) for close in closes])

    def _key_close(self, value: Any) -> str:
        if not self.marks:
            return self.key_close
        place = min(KINDS.index(json_kind(value)), len(self.marks) - 1)
        return self.key_close.replace("{mark}", self.marks[place])

    def _quoted(self, value: Any) -> str:
        """The value as it is written; between quotes if it is a string that could be taken for markup."""
        text = plain(value)
        if self.quotes is None or not isinstance(value, str) or not re.search(r"[<&\n]", text):
            return text
        return f"{self.quotes[0]}{text}{self.quotes[1]}"

    def _typed(self, schema: Schema, mark: str | None, value: str) -> str:
        """The JSON text of a value."""
        if self.quotes is not None and value.strip().startswith(self.quotes[0]):
            inner = value.strip().removeprefix(self.quotes[0])
            if inner.endswith(self.quotes[1]):
                return marked_text(schema, inner.removesuffix(self.quotes[1]), is_text=True)
        value = unpadded(value) if self.padding else value
        return (
            typed_text(schema, value)
            if mark is None
            else marked_text(schema, value, is_text=mark == self.marks[0])
        )

    def _pairs(self, text: str) -> list[tuple[str, str | None, str]] | None:
        """Key, mark and value of each argument; None if something else stands between them."""
        key_open, value_close = re.escape(self.key_open), re.escape(self.value_close)
        key_close = r"\s*".join(_pattern(part) for part in self.key_close.split())
        one = re.compile(
            rf"\s*{key_open}(?P<key>[^<>]*?){key_close}(?P<value>.*?){value_close}(?=\s*(?:{key_open}|\Z))",
            re.DOTALL,
        )
        pairs, position = [], 0
        while (found := one.match(text, position)) is not None:
            mark = found["mark"] if self.marks else None
            pairs.append((found["key"].strip().strip('"'), mark, found["value"]))
            position = found.end()
        return pairs if not text[position:].strip() else None


PLACEHOLDERS = {"index": "[0-9]{1,4}", "id": "[a-z0-9]{10}"}
"""What a model writes for itself in the head of a call."""


def numbered(written: str, name: str) -> list[Form]:
    """The head of a call of this function."""
    parts = re.split(r"\{(name|index|id)\}", written)
    parts_of_model = {key: matching(pattern) for key, pattern in PLACEHOLDERS.items()}
    kinds = {**parts_of_model, "name": verbatim(name)}
    return [kinds[part] if place % 2 else fixed(part) for place, part in enumerate(parts)]


def _pattern(literal: str) -> str:
    """The expression of a literal with placeholders."""
    escaped = re.escape(literal)
    return escaped.replace(r"\{index\}", "[0-9]*").replace(r"\{mark\}", r"(?P<mark>\w*)")


@lru_cache(maxsize=64)
def _head_of(before: str, name_close: str) -> re.Pattern[str]:
    """What stands before a call's first value, or the beginning of it."""
    name = rf"[^\s<>{{}}{re.escape(name_close[:1])}]*"
    chars = re.findall(r"\{index\}|.", name_close, re.DOTALL)
    close = "".join("[0-9]*" if char == "{index}" else rf"{re.escape(char)}?" for char in chars)
    return re.compile(rf"{re.escape(before)}\s*{name}\s*{close}\s*")


def is_begun(word: str, known: Iterable[str], *, is_whole: bool) -> bool:
    """Tell whether a word, of which the end may be missing, is one of those that are known."""
    return any(name == word if is_whole else name.startswith(word) for name in known)


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
