"""One choice of a chat completion: the model's text, taken apart into content and tool calls.

Invariant: a whole answer and a stream go through the same object, the one in one piece, the other in many.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from quire.entrypoints.chat.tool_parser import PlainParser, ToolCall, ToolParser
from quire.entrypoints.openai.protocol.responses import FunctionCall, ToolCallMessage


@dataclass
class ChoicePart:
    """What one piece of text added."""

    content: str = ""
    tool_calls: list[ToolCallMessage] = field(default_factory=list)
    finish_reason: str | None = None


class ChatChoiceBuilder:
    """Feeds the parser of one choice and numbers its calls.

    Args:
        max_calls: calls beyond this number are left out (`parallel_tool_calls: false` allows one).
    """

    def __init__(self, parser: ToolParser, max_calls: int | None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether text just passes."""
        return isinstance(self._parser, PlainParser)

    def take(self, text: str, finish_reason: str | None) -> ChoicePart:
        """The next piece of text; with a finish reason, the last one."""
        parts = self.parts(text, finish_reason)
        content = "".join(part.content for part in parts)
        calls = [call for part in parts for call in part.tool_calls]
        return ChoicePart(content, calls, parts[-1].finish_reason)

    def parts(self, text: str, finish_reason: str | None) -> list[ChoicePart]:
        """The same in the model's order: a part is text and the calls after it. At least one."""
        found = self._parser.feed(text)
        if finish_reason is not None:
            found += self._parser.finish()
        parts = [ChoicePart()]
        for item in found:
            if isinstance(item, ToolCall):
                self._add_call(item, parts[-1])
            elif parts[-1].tool_calls:
                parts.append(ChoicePart(item))
            else:
                parts[-1].content += item
        ends_in_calls = finish_reason == "stop" and self._num_calls
        parts[-1].finish_reason = "tool_calls" if ends_in_calls else finish_reason
        return parts

    def _add_call(self, call: ToolCall, part: ChoicePart) -> None:
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            return
        part.tool_calls.append(
            ToolCallMessage(
                index=self._num_calls,
                id=f"chatcmpl-tool-{secrets.token_hex(8)}",
                function=FunctionCall(call.name, call.arguments),
            )
        )
        self._num_calls += 1
