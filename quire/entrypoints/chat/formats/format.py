# SPDX-License-Identifier: Apache-2.0
"""Data of a tool-call format and of a reasoning format, used for parsing, writing and constraints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.entrypoints.chat.formats.syntax import Syntax


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls: where they may stand in an answer, and how each is written.

    Args:
        calls: syntaxes of a call; the first is the one the model was trained on.
        opens: markers that begin a section of calls.
        closes: markers that end a section; without any, the first text that is not a call ends it.
        skips: separators between the calls of a section, besides white space.
        bare: characters with which a section may begin at the start of the answer, without a marker.
        needs_required: calls begin like text, so they can only be enforced where no text is allowed.
        only_known: a call must name a tool of the request, for formats that resemble other text.
        opening, separator, closing: what a model writes around its calls, and between two of them.
        each: every call has a section of its own.
        evidence: alternatives; a chat template that contains all texts of one uses this format.
        aliases: other names.
    """

    name: str
    calls: tuple[Syntax, ...]
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    bare: str = ""
    needs_required: bool = False
    only_known: bool = False
    opening: str = ""
    separator: str = "\n"
    closing: str = ""
    each: bool = False
    evidence: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        """Beginnings of calls that are recognized even without the section's marker."""
        return tuple(call.before for call in self.calls if call.before and not call.needs_marker)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of calls (names with arguments) as a model of this format writes it."""
        written = [
            self.calls[0].write(name, arguments, index) for index, (name, arguments) in enumerate(calls)
        ]
        if self.each:
            return self.separator.join(f"{self.opening}{call}{self.closing}" for call in written)
        return f"{self.opening}{self.separator.join(written)}{self.closing}"

    def shows(self, special_token: str) -> bool:
        """Return whether this special token must be kept in the text to parse it."""
        syntax = (str(value) for call in self.calls for value in vars(call).values())
        literals = (
            *self.opens,
            *self.closes,
            *self.skips,
            self.opening,
            self.closing,
            self.separator,
            *syntax,
        )
        return any(special_token in literal for literal in literals)


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of a model's reasoning.

    Args:
        opens: markers that begin reasoning; a prompt may end in one.
        closes: markers that end it.
        starts_open: answers begin with reasoning without a marker.
        silent: markers around other parts of the answer, removed from its text.
        heads: text before a call, with `{name}` for its tool, also removed.
        ends_at_calls: a tool call ends reasoning, too.
        evidence, aliases: as in `ToolFormat`.
    """

    name: str
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    starts_open: bool = False
    silent: tuple[str, ...] = ()
    heads: str = ""
    ends_at_calls: bool = False
    evidence: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()

    def with_tools(self, names: Iterable[str]) -> ReasoningFormat:
        """Return the format of an answer to a request with these tools."""
        if not self.heads:
            return self
        return replace(self, silent=(*self.silent, *(self.heads.format(name=name) for name in names)))

    def is_open_after(self, prompt: str, continued: str = "", *, may_think: bool = True) -> bool:
        """Return whether an answer to this prompt begins inside of the reasoning.

        Args:
            continued: the message that the answer continues, if any.
            may_think: thinking is not disabled, so reasoning may begin without a marker in the prompt.
        """
        end = prompt.rstrip()
        if continued:
            last_open = max(map(continued.rfind, self.opens), default=-1)
            return last_open > max(map(continued.rfind, self.closes), default=-1)
        if any(end.endswith(marker) for marker in self.opens):
            return True
        return self.starts_open and may_think and not any(end.endswith(marker) for marker in self.closes)

    def shows(self, special_token: str) -> bool:
        """Return whether this special token must be kept in the text to parse it."""
        return any(special_token in literal for literal in (*self.opens, *self.closes, *self.silent))
