"""The message that the chunks of a chat completion are."""

from __future__ import annotations

from typing import Any

from quire.entrypoints.cli.answer_printer import AnswerPrinter
from quire.entrypoints.cli.client import Event

THOUGHTS = ("reasoning", "reasoning_content")
"""What servers call it; quire says both, with the same text."""


class ChatMessage:
    """Takes chunks, prints what they add, and knows the whole message, as it is sent back."""

    def __init__(self) -> None:
        self._printer = AnswerPrinter()
        self._texts: dict[str, list[str]] = {"content": [], **{name: [] for name in THOUGHTS}}
        self.tool_calls: list[dict[str, Any]] = []

    def take(self, event: Event) -> None:
        for choice in event.get("choices", []):
            delta = choice["delta"]
            for name, texts in self._texts.items():
                texts.append(delta.get(name) or "")
            self._printer.thought(next((delta[name] for name in THOUGHTS if delta.get(name)), ""))
            self._printer.said(delta.get("content") or "")
            for piece in delta.get("tool_calls") or []:
                self._add_call(piece)

    def end(self) -> None:
        """The last chunk was taken."""
        if any(self._text(name) for name in self._texts) or not self.tool_calls:
            self._printer.end()

    def as_sent(self) -> dict[str, Any]:
        """For the conversation: the reasoning by the name that the server has for it."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text("content")}
        thought = next((name for name in THOUGHTS if self._text(name)), None)
        if thought is not None:
            message[thought] = self._text(thought)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def _text(self, name: str) -> str:
        return "".join(self._texts[name])

    def _add_call(self, piece: dict[str, Any]) -> None:
        """Pieces of one call have its index; the first names it."""
        index = piece.get("index", len(self.tool_calls))
        while len(self.tool_calls) <= index:
            function = {"name": "", "arguments": ""}
            self.tool_calls.append({"id": "", "type": "function", "function": function})
        call, added = self.tool_calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += added.get("name") or ""
        call["function"]["arguments"] += added.get("arguments") or ""
