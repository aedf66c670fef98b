"""`AnswerParser`: reads a model's answer as it arrives, and tells content, reasoning and tool calls apart.

Invariants: however the text is cut into pieces, what is found is the same: a whole answer is one piece. What is no
valid call comes back as text, as it was, unless the answer was cut within it: a call that was begun is left out. White
space next to a marker belongs to the marker. The cost of a piece is linear in its length.

The text is a row of regions: plain text, reasoning, a section of calls. Each takes what is its own and says which
region goes on with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.entrypoints.chat.formats.ends import End
from quire.entrypoints.chat.formats.events import Event, Reasoning, Tools
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.markers import Markers
from quire.entrypoints.chat.formats.syntax import BareSyntax, Syntax


class AnswerReader(Protocol):
    """What reads one answer; made anew for each."""

    @property
    def call_markers(self) -> Sequence[bool]:
        """For each marker of calls that stood in reasoning so far, whether a call followed, and so ended it."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether the reader is inside of text or reasoning of which it gave out a part."""
        ...

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece, in order."""
        ...

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """Return what was held back; nothing may be fed afterwards.

        Args:
            was_cut: the model did not end the answer itself, so a marker or call that has begun is left out.
        """
        ...


class Region(Protocol):
    """A part of an answer."""

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        """Take in a piece; if the region ends in it, what goes on and the rest of the text."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether a part of this text or reasoning was given out."""
        ...

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        """End the answer here; see `AnswerReader.finish`."""
        ...


class AnswerParser:
    """Reads one answer.

    Args:
        tools: the tools of the request.
        in_reasoning: the answer begins inside of the reasoning.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Tools | None = None,
        *,
        in_reasoning: bool = False,
    ) -> None:
        grammar = Grammar(tool_format, reasoning, tools or {})
        begins_inside = in_reasoning and reasoning is not None
        self._region: Region = ThoughtRegion(grammar) if begins_inside else TextRegion(grammar, at_start=True)
        self.call_markers = grammar.call_markers

    def feed(self, text: str) -> list[Event]:
        found: list[Event] = []
        rest = text
        while rest and (turn := self._region.take(rest, found)) is not None:
            self._region, rest = turn
        return found

    @property
    def is_open(self) -> bool:
        return self._region.is_open

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        found: list[Event] = []
        self._region.end(found, was_cut=was_cut)
        return found


class Grammar:
    """What may stand in an answer, known to all of its regions.

    Attributes:
        call_markers: see `AnswerReader`.
    """

    def __init__(
        self, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, tools: Tools
    ) -> None:
        self.tools = tools
        self.tool_format = tool_format
        self.opens = frozenset(tool_format.opens if tool_format else ())
        self.starts = frozenset(tool_format.starts if tool_format else ())
        self.thinks = frozenset(reasoning.opens if reasoning else ())
        silent = reasoning.silent if reasoning else ()
        self.in_text = Markers.of(*self.opens, *self.starts, *self.thinks, *silent)
        ends = reasoning.closes if reasoning else ()
        calls = self.opens if reasoning and reasoning.ends_at_calls else ()
        self.in_thought = Markers.of(*ends, *calls, *self.thinks)
        self.between = Markers.of(*(tool_format.closes + tool_format.skips if tool_format else ()))
        self.bare = tool_format.bare if tool_format else ""
        self._calls = Markers.of(*self.opens)
        self.call_markers: list[bool] = []

    def tell(self, thought: str, *, ended: bool) -> None:
        """What stood in the reasoning, from a marker of calls on, and whether a call at its end ended that."""
        num_markers = self._calls.count(thought)
        if num_markers:
            self.call_markers += [True] if ended else [False] * num_markers


class TextRegion:
    """Plain text. White space is held back until it is known what follows it.

    Args:
        at_start: nothing was said before, so bare calls may come.
        hides_space: white space at the beginning belongs to the marker before it, whatever follows.
        after_call: white space belongs to the call before it, if nothing else follows.
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        at_start: bool = False,
        hides_space: bool = False,
        after_call: bool = False,
    ) -> None:
        self._grammar = grammar
        self._may_be_bare = at_start and bool(grammar.bare)
        self._at_start = at_start
        self._hides_space = hides_space
        self._after_call = after_call
        self._space: list[str] = []
        """White space that was held back; behind it stands `_opened`, the beginning of a marker."""
        self._opened = ""
        self.is_open = False

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        text, self._opened = self._opened + text, ""
        if self._may_be_bare and (visible := text.lstrip()):
            self._may_be_bare = False
            if visible[0] in self._grammar.bare:
                self._space.append(text[: len(text) - len(visible)])
                return SectionRegion(self._grammar, "".join(self._space), is_bare=True), visible
        marker, num_open = self._grammar.in_text.scan(text)
        if marker is not None:
            self._give_out(text[: marker.start()], found)
            begins_call = marker.group() in self._grammar.starts
            return self._after(marker.group()), text[marker.start() if begins_call else marker.end() :]
        certain, self._opened = text[: len(text) - num_open], text[len(text) - num_open :]
        self._give_out(certain, found)
        return None

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        if was_cut and self._begins_marker:
            self.is_open = False
            return
        self._give_out(self._opened, found)
        if self._space and not self._after_call:
            found.append("".join(self._space))

    @property
    def _begins_marker(self) -> bool:
        """Return whether a marker has begun; one of letters does not begin within a word."""
        is_word = self._opened[:1].isalnum() and self.is_open and not self._space
        return bool(self._opened) and not is_word

    def _after(self, marker: str) -> Region:
        if marker in self._grammar.opens:
            return SectionRegion(self._grammar, "".join([*self._space, marker]))
        if marker in self._grammar.starts:
            return SectionRegion(self._grammar, "".join(self._space))
        if marker in self._grammar.thinks:
            return ThoughtRegion(self._grammar)
        return TextRegion(self._grammar, at_start=self._at_start, hides_space=True)

    def _give_out(self, text: str, found: list[Event]) -> None:
        """Give out all but the white space at the end."""
        if self._hides_space:
            text = text.lstrip()
        visible = text.rstrip()
        if visible:
            self._at_start = self._hides_space = self._after_call = False
            self.is_open = True
            found.append("".join([*self._space, visible]))
            self._space = []
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])


class ThoughtRegion:
    """Reasoning, up to its end; white space on either side belongs to the markers."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.is_open = False
        self._space: list[str] = []
        self._opened = ""

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        text, self._opened = self._opened + text, ""
        marker, num_open = self._grammar.in_thought.scan(text)
        while marker is not None:
            self._give_out(text[: marker.start()], found)
            text = text[marker.end() :]
            if marker.group() in self._grammar.opens:
                raw, self._space = "".join([*self._space, marker.group()]), []
                return SectionRegion(self._grammar, raw, thought=self), text
            if marker.group() not in self._grammar.thinks:
                return TextRegion(self._grammar, at_start=True, hides_space=True), text
            if self.is_open:  # it is being thought about; at the beginning it says what is known
                self._give_out(marker.group(), found)
            marker, num_open = self._grammar.in_thought.scan(text)
        certain, self._opened = text[: len(text) - num_open], text[len(text) - num_open :]
        self._give_out(certain, found)
        return None

    def take_back(self, text: str, found: list[Event]) -> None:
        """What looked like the end of the reasoning is part of it."""
        self._give_out(text, found)

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        if not was_cut:
            self._give_out(self._opened, found)

    def _give_out(self, text: str, found: list[Event]) -> None:
        text = text if self.is_open else text.lstrip()
        visible = text.rstrip()
        if visible:
            self.is_open = True
            found.append(Reasoning("".join([*self._space, visible])))
            self._space = []
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])


class SectionRegion:
    """A section of calls: between two calls, or in one.

    Args:
        raw: the marker that began it with the white space before, which come back if the first thing is no call.
        thought: the reasoning in which the marker stands; only a call ends it, since reasoning may mention markers.
        is_bare: no marker began it.
    """

    is_open = False

    def __init__(
        self, grammar: Grammar, raw: str, *, thought: ThoughtRegion | None = None, is_bare: bool = False
    ) -> None:
        assert grammar.tool_format is not None
        self._grammar = grammar
        self._format = grammar.tool_format
        self._thought = thought
        self._is_bare = is_bare
        self._raw = [raw]
        """All that came since the last call was given out, and is no part of one."""
        self._opened = ""
        """Between calls: the beginning of something."""
        self._is_fresh = True
        """Nothing has come since the marker."""
        self._has_call = False
        """The last thing was a call, so what separates it from the next is no text."""
        self._call: tuple[Syntax, End] | None = None
        self._pieces: list[str] = []

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        while text:
            if self._call is not None:
                text = self._in_call(text, found, *self._call)
                continue
            text, self._opened = self._opened + text, ""
            region, text = self._between(text, found)
            if region is not self:
                return region, text
        return None

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        if was_cut and self._has_begun:
            if self._thought is not None:
                self._grammar.tell("".join(self._raw), ended=True)
            return
        if self._call is not None:
            self._raw += self._pieces
            self._has_call = False
        elif self._opened and not (self._has_call and self._grammar.between.may_begin(self._opened)):
            self._raw.append(self._opened)
            self._has_call = False
        if not self._has_call:
            self._lose(found)

    @property
    def _has_begun(self) -> bool:
        """Whether a call has, or what can be nothing else. Without a marker that is told by its beginning."""
        begun = "".join(self._pieces) or self._opened
        if not self._is_bare or not begun:
            return True
        calls = [call for call in self._format.calls if isinstance(call, BareSyntax)]
        return any(call.may_begin(begun, self._grammar.tools) for call in calls)

    def _between(self, text: str, found: list[Event]) -> tuple[Region, str]:
        """Begin a call, or end the section, or wait for more; with the rest of the text."""
        while visible := text.lstrip():
            if visible is not text:
                self._raw.append(text[: len(text) - len(visible)])
            marker = self._grammar.between.at(visible)
            if marker is None:
                return self._at_something(visible, found)
            self._raw.append(marker)
            text = visible[len(marker) :]
            self._is_fresh = marker in self._grammar.opens
            if marker in self._format.closes:
                return self._after_section(found), text
        self._raw.append(text)
        return self, ""

    def _at_something(self, text: str, found: list[Event]) -> tuple[Region, str]:
        """What begins here is a call, or nothing of a section, or still unknown."""
        possible = [call for call in self._format.calls if self._is_fresh or not call.needs_marker]
        begun = [call.begins(text) for call in possible]
        if True in begun:
            call = possible[begun.index(True)]
            self._call = call, call.end()
            self._is_fresh = False
            return self, text
        if None in begun or self._grammar.between.may_begin(text):
            self._opened = text
            return self, ""
        space = "".join(self._raw)
        space = space[len(space.rstrip()) :] if self._has_call else ""
        return self._after_section(found), space + text

    def _in_call(self, text: str, found: list[Event], syntax: Syntax, end: End) -> str:
        """Take in a piece of a call; what follows its end."""
        index = end.take(text)
        self._pieces.append(text)
        if index is None:
            return ""
        joined = "".join(self._pieces)
        size = len(joined) - len(text) + index
        written, rest = joined[:size], joined[size:]
        self._pieces, self._call = [], None
        call = syntax.parse(written, self._grammar.tools)
        if call is None or (self._format.only_known and call.name not in self._grammar.tools):
            self._raw.append(written)
            self._lose(found)
        else:
            if self._thought is not None:
                self._grammar.tell("".join(self._raw), ended=True)
            self._raw, self._has_call, self._thought, self._is_bare = [], True, None, False
            found.append(call)
        return rest

    def _after_section(self, found: list[Event]) -> Region:
        has_call = self._has_call
        if not has_call:
            self._lose(found)
        return self._thought or TextRegion(self._grammar, after_call=has_call)

    def _lose(self, found: list[Event]) -> None:
        """What came is no call: it is text."""
        text = "".join(self._raw)
        self._raw, self._has_call = [], False
        if self._thought is not None:
            self._grammar.tell(text, ended=False)
            self._thought.take_back(text, found)
        elif text:
            found.append(text)
