"""Formats that are languages of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.ends import End, QuotedEnd
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.syntax import json_object, to_json

QUOTE = "<escape>"


@dataclass(frozen=True)
class GemmaCall:
    """`<start_function_call>call:name{key:<escape>text<escape>,n:1}<end_function_call>`: JSON with bare keys."""

    before: str = "call:"
    close: str = "<end_function_call>"
    quote: str = QUOTE
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
        return f"{self.before}{name}{_gemma(arguments)}{self.close}"

    def _as_json(self, text: str) -> str:
        """Strings and what is between them take turns."""
        parts = text.split(QUOTE)
        parts[0::2] = [re.sub(r"([{,]\s*)([\w.\-]+)\s*:", r'\1"\2":', part) for part in parts[0::2]]
        parts[1::2] = [to_json(part) for part in parts[1::2]]
        return "".join(parts)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return to_json(value)
