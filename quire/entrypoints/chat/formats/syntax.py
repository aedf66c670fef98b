# SPDX-License-Identifier: Apache-2.0
"""Syntaxes of one call: detection, end, parsing, writing and constraint.

Each syntax is data: the literals around name and arguments. Parsers return None for text that is not a valid call.
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
    UnenforceableError,
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
from quire.entrypoints.chat.formats.elements import GemmaLiterals
from quire.entrypoints.chat.formats.scanning import (
    MAX_HEAD_CHARS,
    MAX_SPACE,
    CallEnd,
    HeadedJsonEnd,
    MarkerEnd,
    QuotedEnd,
    ToolCall,
    Tools,
    json_end,
)
from quire.entrypoints.chat.formats.tagged import (
    KINDS,
    VALUES,
    Tags,
    json_kind,
    marked_text,
    object_text,
    plain,
    tagged_value,
    to_json,
    typed_text,
    unpadded,
)

LINE_HEAD = re.compile(r"[A-Za-z_][\w\-]{0,63}(?P<space>\s*)")
# Parts of a call's head that the model makes up.
PLACEHOLDERS = {"index": "[0-9]{1,4}", "id": "[a-z0-9]{10}"}
BARE_KEY = re.compile(
    r"([{,]\s*)([^\s\"{}\[\],](?:[^\"{}\[\],]*[^\s\"{}\[\],])?)\s*:(?=\s*(?:\Z|[-\d{\[tfnTFN]))"
)  # An unquoted key and its value, or the end of the text if the value is a string.
BARE_WORD = re.compile(r"(?<=[:,\[])(\s*)(True|False|None)(?=\s*[,}\]])")  # A Python constant as a value.
JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Syntax(Protocol):
    """Syntax of one call."""

    @property
    def before(self) -> str:
        """Text that every call begins with; "" if calls have no distinctive beginning."""
        ...

    @property
    def needs_marker(self) -> bool:
        """True if a call looks like ordinary text, so that it is only recognized behind a marker."""
        ...

    def begins(self, text: str) -> bool | None:
        """Return whether a call begins with this non-empty text; None if more text is needed."""
        ...

    def end(self) -> CallEnd:
        """Return a finder of the end of a call that begins with the next piece."""
        ...

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        """Parse a text that begins and ends like a call; None if it is invalid."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        """Return a call as a model writes it; `index` counts the calls of an answer."""
        ...

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        """Return the structural-tag piece of a function's valid calls, which `write` satisfies.

        Args:
            schema: of the arguments; unless `strict`, only their names count.

        Raises:
            UnenforceableError: the schema cannot be enforced in this syntax.
        """
        ...


@runtime_checkable
class BareSyntax(Protocol):
    """Syntax whose calls may stand at the beginning of an answer without a marker."""

    def may_begin(self, text: str, tools: Tools) -> bool:
        """Return whether this incomplete text can be the beginning of a call of one of the tools."""
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

    def end(self) -> CallEnd:
        return json_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        fields = json_object(text)
        if fields is not None and "function" in fields:  # OpenAI's form, around name and arguments
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
    """`{"function name": {...}}`."""

    before: ClassVar[str] = ""
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        return text[0] == "{"

    def end(self) -> CallEnd:
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
    """A head with the name, and the arguments as a JSON object.

    Args:
        before: begins the call.
        head: expression between that and the object, without surrounding white space. It has a group `name`, and a
            group `id` if the model numbers its calls.
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

    def end(self) -> CallEnd:
        return HeadedJsonEnd()

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
    """A line with the name, then the arguments as a JSON object; text with another beginning is not a call."""

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


@dataclass(frozen=True)
class TaggedCall:
    """A name, then a key and a value between literals for each argument; values are text.

    A value is a string if the tool's schema says so, else JSON. With padding, one newline on either side of a value
    belongs to the literals.

    Args:
        name_close: ends the name; it may hold `{index}`, the number of the call.
        key_close: ends the key; it may hold `{mark}`, the value's type.
        padding: written on either side of a value.
        gap: written between the parts of a call.
        outer: ends the section, and also a call with values whose own end is missing.
        marks: type names in `key_close` for strings and then other values; six follow the order of `KINDS`.
        quotes: optional delimiters of a string that holds markup.
        index_from: number of the first call.
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

    def end(self) -> CallEnd:
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
        """Match the key's end before a value of one of these types."""
        closes = [self.key_close.replace("{mark}", mark) for mark in marks or ("",)]
        return either([fixed(close + self.padding) for close in closes])

    def _key_close(self, value: Any) -> str:
        if not self.marks:
            return self.key_close
        place = min(KINDS.index(json_kind(value)), len(self.marks) - 1)
        return self.key_close.replace("{mark}", self.marks[place])

    def _quoted(self, value: Any) -> str:
        """Return the written value, quoted if it is a string that resembles markup."""
        text = plain(value)
        if self.quotes is None or not isinstance(value, str) or not re.search(r"[<&\n]", text):
            return text
        return f"{self.quotes[0]}{text}{self.quotes[1]}"

    def _typed(self, schema: Schema, mark: str | None, value: str) -> str:
        """Return the JSON text of a value."""
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
        """Return key, type and value of each argument; None if there is other text between them."""
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


def numbered(written: str, name: str) -> list[Form]:
    """Match the head of a call of this function."""
    parts = re.split(r"\{(name|index|id)\}", written)
    parts_of_model = {key: matching(pattern) for key, pattern in PLACEHOLDERS.items()}
    kinds = {**parts_of_model, "name": verbatim(name)}
    return [kinds[part] if place % 2 else fixed(part) for place, part in enumerate(parts)]


def _pattern(literal: str) -> str:
    """Return the expression of a literal with placeholders."""
    escaped = re.escape(literal)
    return escaped.replace(r"\{index\}", "[0-9]*").replace(r"\{mark\}", r"(?P<mark>\w*)")


@lru_cache(maxsize=64)
def _head_of(before: str, name_close: str) -> re.Pattern[str]:
    """Return an expression for the text before a call's first value, or any prefix of it."""
    name = rf"[^\s<>{{}}{re.escape(name_close[:1])}]*"
    chars = re.findall(r"\{index\}|.", name_close, re.DOTALL)
    close = "".join("[0-9]*" if char == "{index}" else rf"{re.escape(char)}?" for char in chars)
    return re.compile(rf"{re.escape(before)}\s*{name}\s*{close}\s*")


def is_begun(word: str, known: Iterable[str], *, is_whole: bool) -> bool:
    """Return whether a word, possibly incomplete, is one of the known ones."""
    return any(name == word if is_whole else name.startswith(word) for name in known)


def json_object(text: str) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a JSON object as raw text; None if it is invalid."""
    try:
        fields = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
        for value in fields.values():
            VALUES.decode(value)  # raw values are skipped by the decoder and not validated
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return fields


def _property(schema: Schema, key: str) -> Schema:
    """Return the schema of one argument; empty if it is missing or cannot be resolved."""
    properties = schema.get("properties")
    try:
        return (
            resolved(properties[key], schema) if isinstance(properties, Mapping) and key in properties else {}
        )
    except UnenforceableError:
        return {}


def _first(fields: Mapping[str, msgspec.Raw], keys: tuple[str, ...]) -> msgspec.Raw | None:
    return next((fields[key] for key in keys if key in fields), None)


def _as_string(raw: msgspec.Raw) -> str | None:
    value = msgspec.json.decode(raw)
    return value if isinstance(value, str) else None


def _arguments_text(text: str) -> str | None:
    """Return the text of a JSON object, also from within a JSON string; None if it is invalid."""
    if text.startswith('"'):
        text = msgspec.json.decode(text.encode())
    if text.strip() in ("", "null"):
        return "{}"
    return text if json_object(text) is not None else None


def _begins(text: str, literal_text: str) -> bool | None:
    if text.startswith(literal_text):
        return True
    return None if literal_text.startswith(text) else False


def _json_key(found: re.Match[str]) -> str:
    return f"{found[1]}{to_json(found[2])}:"


def _json_word(found: re.Match[str]) -> str:
    return f"{found[1]}{JSON_WORDS[found[2]]}"


@dataclass(frozen=True)
class GemmaCall:
    """`call:name{key:<escape>text<escape>,n:1}`: JSON with unquoted keys, and strings between two markers."""

    close: str
    quote: str
    before: str = "call:"
    needs_marker: ClassVar[bool] = True

    def begins(self, text: str) -> bool | None:
        return text.startswith(self.before) or (None if self.before.startswith(text) else False)

    def end(self) -> CallEnd:
        return QuotedEnd(self.close, self.quote)

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        name, brace, body = text.removeprefix(self.before).removesuffix(self.close).partition("{")
        arguments = self._as_json(brace + body.strip())
        if not re.fullmatch(r"[\w.\-]+", name) or json_object(arguments) is None:
            return None
        return ToolCall(name, arguments)

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        return f"{self.before}{name}{self._write(arguments)}{self.close}"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments, values = arguments_of(schema, strict=strict), GemmaLiterals(schema, self.quote)
        items = [row(values.key(one.name), values.argument(one)) for one in arguments]
        body = fields(items, [one.is_required for one in arguments], ",")
        return row(fixed(self.before), verbatim(name + "{"), body, fixed("}" + self.close))

    def _as_json(self, text: str) -> str:
        """Convert to JSON; strings and other text alternate."""
        parts = text.split(self.quote)
        parts[0::2] = [BARE_WORD.sub(_json_word, BARE_KEY.sub(_json_key, part)) for part in parts[0::2]]
        parts[1::2] = [to_json(part) for part in parts[1::2]]
        return "".join(parts)

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._write(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._write, value)) + "]"
        return to_json(value)
