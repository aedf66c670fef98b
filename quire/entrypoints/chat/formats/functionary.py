"""Functionary 3.2: an answer is a row of messages, `>>>recipient`, a line end and what it is to get.

Its prompts end in the first `>>>`, so the marker of the first message stands before the answer and not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.entrypoints.chat.answer_grammar import Calls
from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.constraint import Form, either, fixed, row
from quire.entrypoints.chat.formats.events import Event
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.tool_grammar import calls_in_text, calls_only

MARKER, TO_USER = ">>>", "all\n"


class PromptedReader:
    """Reads an answer of which the prompt holds the first marker; see `AnswerReader`."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._is_begun = True
        self._reader.feed(MARKER)  # it may begin a longer marker, so nothing comes of it yet

    @property
    def call_markers(self) -> Sequence[bool]:
        return self._reader.call_markers

    @property
    def is_open(self) -> bool:
        return self._reader.is_open

    def feed(self, text: str) -> list[Event]:
        return self._without_marker(self._reader.feed(text))

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        return self._without_marker(self._reader.finish(was_cut=was_cut))

    def _without_marker(self, events: list[Event]) -> list[Event]:
        """The prompt's marker is no text of the answer, though it should begin nothing."""
        if not events or not self._is_begun:
            return events
        first, self._is_begun = events[0], False
        if not isinstance(first, str):
            return events
        text = first.removeprefix(MARKER)
        return [text, *events[1:]] if text else events[1:]


@dataclass(frozen=True)
class PromptedGrammar:
    """Constrains an answer of which the prompt holds the first marker; see `AnswerGrammar`."""

    tools: ToolFormat | None

    def text(self, wanted: Form) -> Form:
        return row(fixed(TO_USER), wanted)

    def calls(self, calls: Calls) -> Form:
        first = replace(self._tools, each=False, opening="", separator=MARKER)
        return calls_only(first, calls.functions, at_most_one=calls.at_most_one)

    def text_or_calls(self, wanted: Form, calls: Calls) -> Form:
        return either([self.text(wanted), self.calls(calls)])

    def calls_in_text(self, calls: Calls) -> Form:
        said = calls_in_text(self._tools, calls.functions, at_most_one=calls.at_most_one)
        return either([self.text(said), self.calls(calls)])

    @property
    def _tools(self) -> ToolFormat:
        assert self.tools is not None, "who offers tools has looked for their format"
        return self.tools
