"""Formats that are languages of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import (
    Form,
    Schema,
    arguments_of,
    fields,
    fixed,
    row,
    verbatim,
)
from quire.entrypoints.chat.formats.ends import End, QuotedEnd
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.literals import GemmaLiterals
from quire.entrypoints.chat.formats.syntax import json_object
from quire.entrypoints.chat.formats.typed import to_json

BARE_KEY = re.compile(
    r"([{,]\s*)([^\s\"{}\[\],](?:[^\"{}\[\],]*[^\s\"{}\[\],])?)\s*:(?=\s*(?:\Z|[-\d{\[tfnTFN]))"
)
"""A key that is no string, and behind it a value, or the end of the text if the value is a string."""
BARE_WORD = re.compile(r"(?<=[:,\[])(\s*)(True|False|None)(?=\s*[,}\]])")
"""A value as Python writes it."""
JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _json_key(found: re.Match[str]) -> str:
    return f"{found[1]}{to_json(found[2])}:"


def _json_word(found: re.Match[str]) -> str:
    return f"{found[1]}{JSON_WORDS[found[2]]}"


@dataclass(frozen=True)
class GemmaCall:
    """`call:name{key:<escape>text<escape>,n:1}`: JSON with bare keys, and strings between two marks."""

    close: str
    quote: str
    before: str = "call:"
    needs_marker: ClassVar[bool] = True

    def begins(self, text: str) -> bool | None:
        return text.startswith(self.before) or (None if self.before.startswith(text) else False)

    def end(self) -> End:
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
        """Strings and what is between them take turns."""
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
