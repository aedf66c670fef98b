# SPDX-License-Identifier: Apache-2.0
"""`AnswerParser`: incremental parser that separates content, reasoning and tool calls.

Invariants: the result does not depend on how the text is split into pieces. Invalid calls are returned as the original
text, except that a call truncated by the end of the answer is dropped. White space next to a marker belongs to the
marker. The cost is linear in the length.
An answer is a sequence of regions: text, reasoning, a section of calls. Each consumes its part and names the region
that continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.scanning import CallEnd, Event, Markers, Reasoning, Tools
from quire.entrypoints.chat.formats.syntax import BareSyntax, Syntax


class AnswerReader(Protocol):
    """Reader of one answer."""

    @property
    def call_markers(self) -> Sequence[bool]:
        """Outcome of each call marker inside of reasoning so far: True if a call followed and ended the reasoning."""
        ...

    @property
    def is_open(self) -> bool:
        """True inside of text or reasoning of which a part was emitted."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain after this piece, in order."""
        ...

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """Return the events held back; nothing may be fed afterwards.

        Args:
            was_cut: the model did not end the answer itself, so an incomplete marker or call is dropped.
        """
        ...


class Region(Protocol):
    """Part of an answer."""

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        """Consume a piece; if the region ends in it, return the next region and the rest of the text."""
        ...

    @property
    def is_open(self) -> bool:
        """True if a part of this text or reasoning was emitted."""
        ...

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        """End the answer here; see `AnswerReader.finish`."""
        ...


class AnswerParser:
    """Incremental parser of one answer.

    Args:
        tools: tools of the request.
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
        markers = AnswerMarkers(tool_format, reasoning, tools or {})
        begins_inside = in_reasoning and reasoning is not None
        self._region: Region = (
            ReasoningRegion(markers) if begins_inside else TextRegion(markers, at_start=True)
        )
        self.call_markers = markers.call_markers

    def feed(self, text: str) -> list[Event]:
        found: list[Event] = []
        rest = text
        while rest and (step := self._region.take(rest, found)) is not None:
            self._region, rest = step
        return found

    @property
    def is_open(self) -> bool:
        return self._region.is_open

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        found: list[Event] = []
        self._region.end(found, was_cut=was_cut)
        return found


class AnswerMarkers:
    """Markers of an answer, shared by all of its regions.

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

    def record_markers(self, thought: str, *, ended: bool) -> None:
        """Record the call markers in a piece of reasoning; `ended`: a call at its end ended the reasoning."""
        num_markers = self._calls.count(thought)
        if num_markers:
            self.call_markers += [True] if ended else [False] * num_markers


class TextRegion:
    """Plain text. White space is held back until the following text is known.

    Args:
        at_start: no text came before, so bare calls are possible.
        hides_space: white space at the beginning belongs to the marker before it.
        after_call: white space belongs to the call before it, if nothing else follows.
    """

    def __init__(
        self,
        markers: AnswerMarkers,
        *,
        at_start: bool = False,
        hides_space: bool = False,
        after_call: bool = False,
    ) -> None:
        self._markers = markers
        self._may_be_bare = at_start and bool(markers.bare)
        self._at_start = at_start
        self._hides_space = hides_space
        self._after_call = after_call
        # White space held back; `_opened`, the beginning of a marker, follows it.
        self._space: list[str] = []
        self._opened = ""
        self.is_open = False

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        text, self._opened = self._opened + text, ""
        if self._may_be_bare and (visible := text.lstrip()):
            self._may_be_bare = False
            if visible[0] in self._markers.bare:
                self._space.append(text[: len(text) - len(visible)])
                return SectionRegion(self._markers, "".join(self._space), is_bare=True), visible
        marker, num_open = self._markers.in_text.scan(text)
        if marker is not None:
            self._emit(text[: marker.start()], found)
            begins_call = marker.group() in self._markers.starts
            return self._after(marker.group()), text[marker.start() if begins_call else marker.end() :]
        certain, self._opened = text[: len(text) - num_open], text[len(text) - num_open :]
        self._emit(certain, found)
        return None

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        if was_cut and self._begins_marker:
            self.is_open = False
            return
        self._emit(self._opened, found)
        if self._space and not self._after_call:
            found.append("".join(self._space))

    @property
    def _begins_marker(self) -> bool:
        """True if a marker has begun; a marker of letters does not begin within a word."""
        is_word = self._opened[:1].isalnum() and self.is_open and not self._space
        return bool(self._opened) and not is_word

    def _after(self, marker: str) -> Region:
        if marker in self._markers.opens:
            return SectionRegion(self._markers, "".join([*self._space, marker]))
        if marker in self._markers.starts:
            return SectionRegion(self._markers, "".join(self._space))
        if marker in self._markers.thinks:
            return ReasoningRegion(self._markers)
        return TextRegion(self._markers, at_start=self._at_start, hides_space=True)

    def _emit(self, text: str, found: list[Event]) -> None:
        """Emit all but the white space at the end."""
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


class ReasoningRegion:
    """Reasoning, up to its end; white space on either side belongs to the markers."""

    def __init__(self, markers: AnswerMarkers) -> None:
        self._markers = markers
        self.is_open = False
        self._space: list[str] = []
        self._opened = ""

    def take(self, text: str, found: list[Event]) -> tuple[Region, str] | None:
        text, self._opened = self._opened + text, ""
        marker, num_open = self._markers.in_thought.scan(text)
        while marker is not None:
            self._emit(text[: marker.start()], found)
            text = text[marker.end() :]
            if marker.group() in self._markers.opens:
                raw, self._space = "".join([*self._space, marker.group()]), []
                return SectionRegion(self._markers, raw, thought=self), text
            if marker.group() not in self._markers.thinks:
                return TextRegion(self._markers, at_start=True, hides_space=True), text
            if self.is_open:  # inside of reasoning the marker is quoted; at the beginning it is redundant
                self._emit(marker.group(), found)
            marker, num_open = self._markers.in_thought.scan(text)
        certain, self._opened = text[: len(text) - num_open], text[len(text) - num_open :]
        self._emit(certain, found)
        return None

    def continue_with(self, text: str, found: list[Event]) -> None:
        """Continue the reasoning with text that looked like its end."""
        self._emit(text, found)

    def end(self, found: list[Event], *, was_cut: bool) -> None:
        if not was_cut:
            self._emit(self._opened, found)

    def _emit(self, text: str, found: list[Event]) -> None:
        text = text if self.is_open else text.lstrip()
        visible = text.rstrip()
        if visible:
            self.is_open = True
            found.append(Reasoning("".join([*self._space, visible])))
            self._space = []
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])


class SectionRegion:
    """Section of calls: between two calls, or inside of one.

    Args:
        raw: the section's marker and preceding white space, emitted as text if no call follows.
        thought: the reasoning that contains the marker; only a call ends it, since reasoning may mention markers.
        is_bare: there was no marker.
    """

    is_open = False

    def __init__(
        self,
        markers: AnswerMarkers,
        raw: str,
        *,
        thought: ReasoningRegion | None = None,
        is_bare: bool = False,
    ) -> None:
        assert markers.tool_format is not None
        self._markers = markers
        self._format = markers.tool_format
        self._thought = thought
        self._is_bare = is_bare
        self._raw = [raw]  # Text since the last call was emitted, outside of calls.
        self._opened = ""  # Between calls: the beginning of a call or marker.
        self._is_fresh = True  # Nothing has come since the marker.
        self._has_call = False  # The last item was a call, so the separator before the next one is not text.
        self._call: tuple[Syntax, CallEnd] | None = None
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
                self._markers.record_markers("".join(self._raw), ended=True)
            return
        if self._call is not None:
            self._raw += self._pieces
            self._has_call = False
        elif self._opened and not (self._has_call and self._markers.between.may_begin(self._opened)):
            self._raw.append(self._opened)
            self._has_call = False
        if not self._has_call:
            self._emit_as_text(found)

    @property
    def _has_begun(self) -> bool:
        """True if a call has begun; without a marker, if the text can be nothing else."""
        begun = "".join(self._pieces) or self._opened
        if not self._is_bare or not begun:
            return True
        calls = [call for call in self._format.calls if isinstance(call, BareSyntax)]
        return any(call.may_begin(begun, self._markers.tools) for call in calls)

    def _between(self, text: str, found: list[Event]) -> tuple[Region, str]:
        """Begin a call, end the section, or wait for more; return the next region and the rest of the text."""
        while visible := text.lstrip():
            if visible is not text:
                self._raw.append(text[: len(text) - len(visible)])
            marker = self._markers.between.at(visible)
            if marker is None:
                return self._at_something(visible, found)
            self._raw.append(marker)
            text = visible[len(marker) :]
            self._is_fresh = marker in self._markers.opens
            if marker in self._format.closes:
                return self._after_section(found), text
        self._raw.append(text)
        return self, ""

    def _at_something(self, text: str, found: list[Event]) -> tuple[Region, str]:
        """Begin a call, wait for more text, or end the section."""
        possible = [call for call in self._format.calls if self._is_fresh or not call.needs_marker]
        begun = [call.begins(text) for call in possible]
        if True in begun:
            call = possible[begun.index(True)]
            self._call = call, call.end()
            self._is_fresh = False
            return self, text
        if None in begun or self._markers.between.may_begin(text):
            self._opened = text
            return self, ""
        space = "".join(self._raw)
        space = space[len(space.rstrip()) :] if self._has_call else ""
        return self._after_section(found), space + text

    def _in_call(self, text: str, found: list[Event], syntax: Syntax, end: CallEnd) -> str:
        """Consume a piece of a call; return what follows its end."""
        index = end.take(text)
        self._pieces.append(text)
        if index is None:
            return ""
        joined = "".join(self._pieces)
        size = len(joined) - len(text) + index
        written, rest = joined[:size], joined[size:]
        self._pieces, self._call = [], None
        call = syntax.parse(written, self._markers.tools)
        if call is None or (self._format.only_known and call.name not in self._markers.tools):
            self._raw.append(written)
            self._emit_as_text(found)
        else:
            if self._thought is not None:
                self._markers.record_markers("".join(self._raw), ended=True)
            self._raw, self._has_call, self._thought, self._is_bare = [], True, None, False
            found.append(call)
        return rest

    def _after_section(self, found: list[Event]) -> Region:
        has_call = self._has_call
        if not has_call:
            self._emit_as_text(found)
        return self._thought or TextRegion(self._markers, after_call=has_call)

    def _emit_as_text(self, found: list[Event]) -> None:
        """Emit the collected text, which is not a call."""
        text = "".join(self._raw)
        self._raw, self._has_call = [], False
        if self._thought is not None:
            self._markers.record_markers(text, ended=False)
            self._thought.continue_with(text, found)
        elif text:
            found.append(text)
