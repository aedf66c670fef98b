"""A format of tool calls, a format of reasoning: data, from which text is read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.entrypoints.chat.formats.syntax import Syntax


@dataclass(frozen=True)
class ToolFormat:
    """Where calls may stand in an answer, and how each is written.

    Args:
        calls: the ways in which a call may be written; the first is how the model was taught.
        opens: markers, each of which begins a section of calls.
        closes: what ends a section; without it the first thing that is no call does.
        skips: what may stand between the calls of a section, beside white space.
        bare: characters with which a section may begin at the beginning of the answer, without a marker.
        needs_required: calls begin as text does, so they can be enforced only where no text may come.
        only_known: a call is one only if the request has a tool of its name: for formats that look like other text.
        opening, separator, closing: what a model writes around its calls, and between two of them.
        each: every call has a section of its own.
        evidence: each of these, if all of it is in a chat template, says that its model writes this format.
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
        """How a call may begin, so that it is one though the model forgot the section's marker."""
        return tuple(call.before for call in self.calls if call.before and not call.needs_marker)

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The text of some calls, names with arguments, as a model of this format writes it."""
        written = [
            self.calls[0].write(name, arguments, index) for index, (name, arguments) in enumerate(calls)
        ]
        if self.each:
            return self.separator.join(f"{self.opening}{call}{self.closing}" for call in written)
        return f"{self.opening}{self.separator.join(written)}{self.closing}"

    def shows(self, special_token: str) -> bool:
        """Whether this special token of a model must be in the text that is read."""
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
    """What stands around a model's reasoning.

    Args:
        opens: each of these markers begins it; a prompt that ends in one has begun it.
        closes: each of these ends it.
        starts_open: an answer begins with reasoning though nothing says so.
        silent: markers around other parts of the answer, which are no part of its text.
        heads: stands before a call, with `{name}` for its tool, and is no part of the text either.
        ends_at_calls: a tool call ends it, too.
        evidence, aliases: as those of a tool format.
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
        """Whether an answer to this prompt begins inside of the reasoning.

        Args:
            continued: the message that the answer goes on with, if there is one.
            may_think: thinking is not turned off, so it may begin though the prompt does not say so.
        """
        end = prompt.rstrip()
        if continued:
            last_open = max(map(continued.rfind, self.opens), default=-1)
            return last_open > max(map(continued.rfind, self.closes), default=-1)
        if any(end.endswith(marker) for marker in self.opens):
            return True
        return self.starts_open and may_think and not any(end.endswith(marker) for marker in self.closes)

    def shows(self, special_token: str) -> bool:
        """Whether this special token of a model must be in the text that is read."""
        return any(special_token in literal for literal in (*self.opens, *self.closes, *self.silent))
