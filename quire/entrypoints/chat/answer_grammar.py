"""Whole answers as constraints: the reasoning that a model may write, and behind it what is asked for.

Invariant: a constraint is made for the place at which its answer begins, as the reader of the answer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.entrypoints.chat.formats.constraint import Form, either
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.tool_grammar import Function, after_reasoning, calls_in_text, calls_only


class Calls(NamedTuple):
    """Functions that may be called, and how often."""

    functions: list[Function]
    at_most_one: bool


class AnswerGrammar(Protocol):
    """The constraints of one answer, in the language of its model. Calls need a format that they can be written in.

    Raises:
        ValidationError: what is asked for cannot be enforced in this language, or from this place on.
    """

    def text(self, wanted: Form) -> Form:
        """This text and no calls; `wanted` itself where nothing stands before it."""
        ...

    def calls(self, calls: Calls) -> Form:
        """One or more of these calls and no text."""
        ...

    def text_or_calls(self, wanted: Form, calls: Calls) -> Form:
        """Either of the two."""
        ...

    def calls_in_text(self, calls: Calls) -> Form:
        """Any text, in which what begins like a call is one of these."""
        ...


@dataclass(frozen=True)
class MarkerGrammar:
    """The grammar of a format with markers; see `AnswerGrammar`.

    Args:
        is_open: the answer begins inside of the reasoning.
        may_open: it may begin with reasoning.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_open: bool = False
    may_open: bool = True

    def text(self, wanted: Form) -> Form:
        if self.reasoning is None:
            return wanted
        return after_reasoning(
            wanted, self.reasoning, self.tools, is_open=self.is_open, may_open=self.may_open
        )

    def calls(self, calls: Calls) -> Form:
        return self.text(self._only(calls))

    def text_or_calls(self, wanted: Form, calls: Calls) -> Form:
        return self.text(either([wanted, self._only(calls)]))

    def calls_in_text(self, calls: Calls) -> Form:
        return self.text(calls_in_text(self._tools, calls.functions, at_most_one=calls.at_most_one))

    def _only(self, calls: Calls) -> Form:
        return calls_only(self._tools, calls.functions, at_most_one=calls.at_most_one)

    @property
    def _tools(self) -> ToolFormat:
        assert self.tools is not None, "who offers tools has looked for their format"
        return self.tools
