"""One choice of a chat completion: the model's text, taken apart into reasoning, content and tool calls.

Invariant: a whole answer and a stream go through the same object, the one in one piece, the other in many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.entrypoints.chat.call_ids import new_call_id
from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.events import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.thought_counter import ThoughtCounter
from quire.entrypoints.openai.protocol.responses import FunctionCall, ToolCallMessage


@dataclass
class ChoicePart:
    """What one piece of text added: reasoning, text behind it, calls behind that."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallMessage] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def place(self) -> int:
        """Of its last thing, in the order of the three."""
        return 2 if self.tool_calls else 1 if self.content else 0


class ChatChoiceBuilder:
    """Reads one choice and numbers its calls.

    Args:
        counter: counts the tokens of reasoning, if the model reasons.
        shows_reasoning: without it reasoning is read, and left out.
        max_calls: calls beyond this number are left out (`parallel_tool_calls: false` allows one).
    """

    def __init__(
        self,
        reader: AnswerReader,
        counter: ThoughtCounter | None = None,
        *,
        shows_reasoning: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self._reader = reader
        self._counter = counter
        self.shows_reasoning = shows_reasoning
        self._max_calls = max_calls
        self._call_ids: set[str] = set()

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.num_tokens if self._counter is not None else 0

    @property
    def is_open(self) -> bool:
        """Whether the reasoning or text that came last has not ended."""
        return self._reader.is_open

    def take(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None, *, was_cut: bool = False
    ) -> ChoicePart:
        """Read the next piece of text; with a finish reason, the last one, which may have been cut."""
        parts = self.parts(text, token_ids, finish_reason, was_cut=was_cut)
        return ChoicePart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            [call for part in parts for call in part.tool_calls],
            parts[-1].finish_reason,
        )

    def parts(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None, *, was_cut: bool = False
    ) -> list[ChoicePart]:
        """The same in the model's order: in each part that is reasoning, text, calls. At least one part."""
        return self.arranged(self.read(text, token_ids, finish_reason, was_cut=was_cut), finish_reason)

    def read(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str | None = None,
        *,
        was_cut: bool = False,
    ) -> list[Event]:
        """Find what is in the next piece of text, for `arranged`."""
        found = self._reader.feed(text)
        if finish_reason is not None:
            found += self._reader.finish(was_cut=was_cut)
        if self._counter is not None:
            self._counter.add(token_ids)
            self._counter.settle(self._reader.call_markers)
        return found

    def arranged(self, found: list[Event], finish_reason: str | None = None) -> list[ChoicePart]:
        """The parts that this makes."""
        parts = [ChoicePart()]
        for event in found:
            self._add(event, parts)
        ends_in_calls = finish_reason == "stop" and self._call_ids
        parts[-1].finish_reason = "tool_calls" if ends_in_calls else finish_reason
        return parts

    def _add(self, event: Event, parts: list[ChoicePart]) -> None:
        place = 2 if isinstance(event, ToolCall) else 0 if isinstance(event, Reasoning) else 1
        if place < parts[-1].place:
            parts.append(ChoicePart())
        if isinstance(event, ToolCall):
            self._add_call(event, parts[-1])
        elif isinstance(event, Reasoning):
            parts[-1].reasoning += event.text if self.shows_reasoning else ""
        else:
            parts[-1].content += event

    def _add_call(self, call: ToolCall, part: ChoicePart) -> None:
        if self._max_calls is not None and len(self._call_ids) >= self._max_calls:
            return
        call_id = call.id
        if call_id is None or call_id in self._call_ids:
            call_id = new_call_id()
        function = FunctionCall(call.name, call.arguments)
        part.tool_calls.append(ToolCallMessage(index=len(self._call_ids), id=call_id, function=function))
        self._call_ids.add(call_id)
