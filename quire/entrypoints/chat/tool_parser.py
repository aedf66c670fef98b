"""Finds tool calls in a model's text as it arrives.

Invariant: there is one implementation, fed with pieces. The whole text at once is one piece, so streaming and
non-streaming cannot disagree. Model output is parsed with `json.loads` and nothing stronger; what is no
valid call stays text, so nothing that the model said is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.entrypoints.chat.tag_scanner import TagScanner
from quire.entrypoints.chat.tool_grammar import HERMES, CallFormat


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolParser(Protocol):
    """Turns pieces of text into text and calls; one instance per completion."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain after this piece, in order."""
        ...

    def finish(self) -> list[str | ToolCall]:
        """What was held back; nothing may be fed afterwards."""
        ...


class PlainParser:
    """For requests without tools: everything is text."""

    def feed(self, text: str) -> list[str | ToolCall]:
        return [text] if text else []

    def finish(self) -> list[str | ToolCall]:
        return []


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it.

    White space next to a call belongs to the call. A call that is cut off by the end of the text counts if
    its JSON is complete.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._scanner = TagScanner(self.OPEN)
        self._call: list[str] | None = None
        self._space = ""
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        for piece in self._scanner.feed(text):
            if piece is not None:
                self._take(piece, found)
            elif self._call is None:
                self._call, self._scanner.tag = [], self.CLOSE
            else:
                self._end_call(found, self.CLOSE)
        return found

    def finish(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        self._take(self._scanner.flush(), found)
        if self._call is not None:
            self._end_call(found, "")
        if self._space and not self._after_call:
            found.append(self._space)
        return found

    def _take(self, piece: str, found: list[str | ToolCall]) -> None:
        if self._call is not None:
            self._call.append(piece)
            return
        visible = piece.rstrip()
        if visible:
            found.append(self._space + visible)
            self._space, self._after_call = "", False
        self._space += piece[len(visible) :]

    def _end_call(self, found: list[str | ToolCall], end: str) -> None:
        assert self._call is not None
        body, self._call, self._scanner.tag = "".join(self._call), None, self.OPEN
        call = parse_call(body)
        if call is None:
            self._take(f"{self.OPEN}{body}{end}", found)
        else:
            self._space, self._after_call = "", True
            found.append(call)


def parse_call(body: str) -> ToolCall | None:
    """The call that a JSON text describes; None if it describes none."""
    try:
        call: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {"hermes": HermesParser}
"""Name, as in `--tool-call-parser`, to the class of the parser."""

CALL_FORMATS: dict[Callable[[], ToolParser], CallFormat] = {HermesParser: HERMES}
"""Of the parsers whose calls can be required: how these are written."""


def resolve_tool_parser(name: str, chat_template: str | None) -> Callable[[], ToolParser] | None:
    """The parser of that name; "auto" goes by what the chat template tells the model to write."""
    if name == "auto":
        name = "hermes" if chat_template is not None and HermesParser.OPEN in chat_template else "none"
    return None if name == "none" else TOOL_PARSERS[name]
