# SPDX-License-Identifier: Apache-2.0
"""Selection of a model's answer formats, by name or from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.entrypoints.chat.formats.answer import AnswerParser, AnswerReader
from quire.entrypoints.chat.formats.examples import ARGUMENTS, NAME, TOOLS, Example
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.harmony import MARKER as FUNCTIONARY_MARKER
from quire.entrypoints.chat.formats.harmony import MARKERS as HARMONY_MARKERS
from quire.entrypoints.chat.formats.harmony import (
    HarmonyGrammar,
    HarmonyReader,
    Opening,
    PromptedGrammar,
    PromptedReader,
)
from quire.entrypoints.chat.formats.reasoning import REASONING_FORMATS
from quire.entrypoints.chat.formats.scanning import Event, Tools
from quire.entrypoints.chat.formats.tools import TOOL_FORMATS
from quire.entrypoints.chat.tool_grammar import AnswerGrammar, MarkerGrammar
from quire.plugins import PluginTable

FUNCTIONARY = "functionary_v32"
HARMONY = ("openai", "openai_gptoss")
Row = TypeVar("Row", bound=ToolFormat | ReasoningFormat)


class PlainReader:
    """Reader without formats: everything is text."""

    call_markers = ()
    is_open = True

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        return []


@dataclass(frozen=True)
class AnswerFormat:
    """Formats of tool calls and reasoning of a model; None: the model has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def describe(self) -> str:
        """Return the formats as a line for the log."""
        tools = self.tools.name if self.tools else "none"
        reasoning = self.reasoning.name if self.reasoning else "none"
        return f"tool calls are read as {tools} (--tool-call-parser), reasoning as {reasoning} (--reasoning-parser)"

    @property
    def _is_harmony(self) -> bool:
        return any(row is not None and row.name in HARMONY for row in (self.tools, self.reasoning))

    def _ends_in_marker(self, prompt: str, continued: str) -> bool:
        """Return whether the prompt ends in the first marker of a Functionary answer."""
        rows = (self.tools, self.reasoning)
        named = any(row is not None and row.name == FUNCTIONARY for row in rows)
        return named and not continued and prompt.endswith(FUNCTIONARY_MARKER)

    def reader(
        self, prompt: str, tools: Tools | None, *, continued: str = "", may_think: bool = True
    ) -> AnswerReader:
        """Return the reader of one answer.

        Args:
            prompt: its end determines whether the answer begins inside of reasoning.
            tools: tools of the request, if calls are allowed.
            continued: the message that the answer continues, if any.
            may_think: thinking is not disabled.
        """
        if self._is_harmony:
            return HarmonyReader(Opening.of(prompt, continued), has_tools=tools is not None)
        tool_format = self.tools if tools is not None else None
        if tool_format is None and self.reasoning is None:
            return PlainReader()
        in_reasoning = self.reasoning is not None and self.reasoning.is_open_after(
            prompt, continued, may_think=may_think
        )
        reasoning = self.reasoning.with_tools(tools or ()) if self.reasoning is not None else None
        parser = AnswerParser(tool_format, reasoning, tools, in_reasoning=in_reasoning)
        return PromptedReader(parser) if self._ends_in_marker(prompt, continued) else parser

    def grammar(self, prompt: str, *, continued: str = "", may_think: bool = True) -> AnswerGrammar:
        """Return the grammar of one answer; arguments as in `reader`."""
        if self._is_harmony:
            return HarmonyGrammar(self.tools, Opening.of(prompt, continued), may_think=may_think)
        if self._ends_in_marker(prompt, continued):
            return PromptedGrammar(self.tools)
        if self.reasoning is None:
            return MarkerGrammar(self.tools, None)
        is_open = self.reasoning.is_open_after(prompt, continued, may_think=may_think)
        may_open = may_think and not continued and not prompt.rstrip().endswith(self.reasoning.closes)
        return MarkerGrammar(self.tools, self.reasoning, is_open=is_open, may_open=may_open)

    def shown_tokens(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """Return the special tokens that must be kept in the text to parse it."""
        rows = [row for row in (self.tools, self.reasoning) if row is not None]
        more = HARMONY_MARKERS if self._is_harmony else ()
        return frozenset(
            token for token in special_tokens if token in more or any(row.shows(token) for row in rows)
        )


def choose(
    tool_name: str, reasoning_name: str, chat_template: str | None, examples: Iterable[Example] = ()
) -> AnswerFormat:
    """Return the formats of these names; "auto" selects by the chat template, "none" is no format.

    Args:
        examples: answers as the template writes them. A format that parses them is preferred, and among those one that
            writes them identically.

    Raises:
        ConfigError: a format is unknown.
    """
    shown = list(examples)
    reasoning = _choose(
        REASONING_FORMATS, reasoning_name, chat_template, lambda row: _reads_thoughts(row, shown)
    )
    tools = _choose(TOOL_FORMATS, tool_name, chat_template, lambda row: _reads_calls(row, reasoning, shown))
    return AnswerFormat(tools, reasoning)


def _choose(
    table: PluginTable[Row], name: str, chat_template: str | None, fits: Callable[[Row], int]
) -> Row | None:
    """Select a row of a table; `fits` rates how well a row parses the examples, 0 if it does not."""
    if name == "none":
        return None
    if name != "auto":
        return table.resolve(name)
    rows: list[Row] = [row for row in map(table.resolve, table.names()) if row.evidence]
    mentioned: list[Row] = [row for row in rows if _mentions(chat_template or "", row)]
    best = max(
        [*mentioned, *reversed(rows)], key=fits
    )  # of equal ones the first, which is the least specific
    if fits(best):
        return best
    return mentioned[0] if mentioned else None


def _mentions(chat_template: str, row: ToolFormat | ReasoningFormat) -> bool:
    return any(all(word in chat_template for word in words) for words in row.evidence)


def _reads_calls(row: ToolFormat, reasoning: ReasoningFormat | None, examples: list[Example]) -> int:
    """Return 1 if the format parses all examples of calls, 2 if it also writes them identically, else 0."""
    calls = [one for one in examples if one.has_call and not _never_ends(reasoning, one)]
    as_taught = replace(row, calls=row.calls[:1])
    if not calls or not all(
        one.calls_are_read(_read(AnswerFormat(as_taught, reasoning), one)) for one in calls
    ):
        return 0
    return 2 if all(row.write([(NAME, ARGUMENTS)]).strip() in one.text for one in calls) else 1


def _never_ends(reasoning: ReasoningFormat | None, one: Example) -> bool:
    """Return whether the prompt opens reasoning that the answer never closes; templates write this, models do not."""
    if reasoning is None or reasoning.name in HARMONY or not reasoning.is_open_after(one.prompt):
        return False
    return not any(close in one.text for close in reasoning.closes)


def _reads_thoughts(row: ReasoningFormat, examples: list[Example]) -> int:
    """Return 1 if the format parses all examples of reasoning, 2 if it also opens it identically, else 0."""
    thoughts = [one for one in examples if one.has_thought]
    if not thoughts or not all(one.thought_is_read(_read(AnswerFormat(None, row), one)) for one in thoughts):
        return 0
    opens = row.opens[0] if row.opens else ""
    return 2 if all(opens in one.prompt + one.text for one in thoughts) else 1


def _read(formats: AnswerFormat, one: Example) -> list[Event]:
    reader = formats.reader(one.prompt, TOOLS)
    return reader.feed(one.text) + reader.finish()
