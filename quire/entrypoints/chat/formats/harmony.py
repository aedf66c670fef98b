# SPDX-License-Identifier: Apache-2.0
"""Message-based formats: Harmony (gpt-oss) and Functionary 3.2, with their readers and grammars.

A Harmony answer is a sequence of messages, each with a channel and an optional recipient. Reasoning is
`<|channel|>analysis<|message|>...<|end|>`, a call `<|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`. Text for the user is in the channel `final`, or in `commentary` without a
recipient. Invariant: free text of a constrained message holds no marker, so the message ends where the grammar says.
A Functionary answer is a sequence of `>>>recipient`, a newline and the content; the prompt ends in the first `>>>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.constraint import NOTHING, Form, either, fixed, listed, row
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.scanning import Event, Markers, Reasoning, ToolCall
from quire.entrypoints.chat.formats.syntax import json_object
from quire.entrypoints.chat.tool_grammar import AllowedCalls, calls_in_text, calls_only, free_text, one_call
from quire.errors import ValidationError
from quire.structured_outputs_params import PARAM

MARKER, TO_USER = ">>>", "all\n"

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ROLE_END = re.compile(r"\s*to=[\w.\-]+\s*")  # Recipient that may end a role begun by the prompt.
MAX_ROLE_END = 256
RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
END, CALL = "<|end|>", "<|call|>"
ANALYSIS, COMMENTARY, FINAL = (
    f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "commentary", "final")
)
NEXT = f"{START}assistant"  # Begins another message.


class PromptedReader:
    """Reader of an answer whose first marker is in the prompt; see `AnswerReader`."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._is_begun = True
        self._reader.feed(MARKER)  # it may begin a longer marker, so no event follows yet

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
        """Remove the prompt's marker from the first event."""
        if not events or not self._is_begun:
            return events
        first, self._is_begun = events[0], False
        if not isinstance(first, str):
            return events
        text = first.removeprefix(MARKER)
        return [text, *events[1:]] if text else events[1:]


@dataclass(frozen=True)
class PromptedGrammar:
    """Grammar of an answer whose first marker is in the prompt; see `AnswerGrammar`."""

    tools: ToolFormat | None

    def text(self, wanted: Form) -> Form:
        return row(fixed(TO_USER), wanted)

    def calls(self, calls: AllowedCalls) -> Form:
        first = replace(self._tools, each=False, opening="", separator=MARKER)
        return calls_only(first, calls.functions, at_most_one=calls.at_most_one)

    def text_or_calls(self, wanted: Form, calls: AllowedCalls) -> Form:
        return either([self.text(wanted), self.calls(calls)])

    def calls_in_text(self, calls: AllowedCalls) -> Form:
        said = calls_in_text(self._tools, calls.functions, at_most_one=calls.at_most_one)
        return either([self.text(said), self.calls(calls)])

    @property
    def _tools(self) -> ToolFormat:
        assert self.tools is not None, "checked by `tools_in_use`"
        return self.tools


class Opening(NamedTuple):
    """State in which an answer begins.

    Attributes:
        head: of the message that the prompt has begun; "" if none.
        in_message: the text of that message has begun, too.
        after_message: a complete message precedes the answer, so the next one begins with its role.
    """

    head: str = ""
    in_message: bool = False
    after_message: bool = False

    @staticmethod
    def of(prompt: str, continued: str = "") -> Opening:
        """Return the state after a prompt; `continued` is the message that the answer continues, if any."""
        _, _, begun = prompt.rstrip().rpartition(START)
        head, message, said = begun.partition(MESSAGE)
        if not continued and any(end in said for end in ENDS):
            return Opening(after_message=True)
        return Opening(head if CHANNEL in head else "", in_message=bool(message or continued))

    @property
    def thinks(self) -> bool:
        """Return whether the message with this complete head is reasoning."""
        _, _, rest = self.head.partition(CHANNEL)
        return re.split(r"[\s<]", rest.lstrip(), maxsplit=1)[0] == "analysis"


def may_end_role(text: str) -> bool:
    """Return whether the text may begin the end of a role."""
    return "to=".startswith(text.strip()) or (
        len(text) <= MAX_ROLE_END and ROLE_END.fullmatch(f"{text.strip()}_") is not None
    )


class HarmonyReader:
    """Reader of a Harmony answer; see `AnswerReader`.

    Args:
        has_tools: messages to functions are calls; without tools they are text.
    """

    call_markers = ()

    def __init__(self, opening: Opening, *, has_tools: bool = True) -> None:
        self._has_tools = has_tools
        self._thinks = False
        self._recipient: str | None = None
        self._in_message = Markers.of(*ENDS, START, CHANNEL)
        self._in_head = Markers.of(*MARKERS)
        self._head = opening.head
        self._is_head = True
        self._space: list[str] = []  # Text before the first head: white space, or what may end a role.
        self._role_end = ""  # Beginning of what may end a role, without leading white space.
        self._held = ""
        self._call: list[str] = []
        if opening.in_message:
            self._end_head()

    def feed(self, text: str) -> list[Event]:
        found: list[Event] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._read_head(text, found) if self._is_head else self._read_message(text, found)
        return found

    @property
    def is_open(self) -> bool:
        return not self._is_head and self._recipient is None

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        found: list[Event] = []
        if was_cut and (self._held or self._role_end):  # an incomplete marker or recipient
            self._held, self._space = "", []
        if not (self._is_head and self._head):
            self._take("".join([*self._space, self._held]), found)
        self._end_message(found, is_last=True, was_cut=was_cut)
        return found

    def _end_head(self) -> None:
        """Evaluate a complete head; its message follows."""
        self._thinks = Opening(self._head).thinks
        recipient = RECIPIENT.search(self._head)
        self._recipient = recipient[1] if recipient and self._has_tools else None
        self._is_head = False

    def _read_head(self, text: str, found: list[Event]) -> str:
        """Read a head up to its message marker; text without a head is a message to the user."""
        marker, num_open = self._in_head.scan(text)
        if marker is None:
            certain, self._held = text[: len(text) - num_open], text[len(text) - num_open :]
            return self._no_head(certain)
        before = "".join([*self._space, text[: marker.start()]])
        if before.strip() and not self._head and not ROLE_END.fullmatch(before):
            return self._no_head(text)
        self._space, self._role_end = [], ""
        if marker.group() in ENDS:
            self._head = ""
        else:
            self._head += before + (marker.group() if marker.group() != MESSAGE else "")
            if marker.group() == MESSAGE:
                self._end_head()
        return text[marker.end() :]

    def _no_head(self, text: str) -> str:
        if self._head:
            self._head += text
            return ""
        self._role_end = (self._role_end + text).lstrip()
        if may_end_role(self._role_end):
            self._space.append(text)
            return ""
        self._end_head()
        text = "".join([*self._space, text, self._held])
        self._space, self._held, self._role_end = [], "", ""
        return text

    def _read_message(self, text: str, found: list[Event]) -> str:
        marker, num_open = self._in_message.scan(text)
        if marker is None:
            certain, self._held = text[: len(text) - num_open], text[len(text) - num_open :]
            self._take(certain, found)
            return ""
        self._take(text[: marker.start()], found)
        self._end_message(found)
        self._is_head = True
        self._head = marker.group() if marker.group() in (START, CHANNEL) else ""
        return text[marker.end() :]

    def _take(self, text: str, found: list[Event]) -> None:
        if not text:
            return
        if self._recipient is not None:
            self._call.append(text)
        else:
            found.append(Reasoning(text) if self._thinks else text)

    def _end_message(self, found: list[Event], *, is_last: bool = False, was_cut: bool = False) -> None:
        name, body = self._recipient, "".join(self._call)
        self._call = []
        if name is None or self._is_head:
            return
        arguments = body.strip() or ("" if is_last else "{}")
        if json_object(arguments) is not None:
            found.append(ToolCall(name, arguments))
        elif body and not was_cut:
            found.append(body)


FREE = free_text(MARKERS)


@dataclass(frozen=True)
class HarmonyGrammar:
    """Grammar of a Harmony answer; see `AnswerGrammar`.

    Args:
        tools: format of calls.
        opening: state in which the answer begins.
        may_think: messages of reasoning may come first.
    """

    tools: ToolFormat | None
    opening: Opening
    may_think: bool = True

    def text(self, wanted: Form) -> Form:
        return wanted if self._in_text else self._behind(_final(wanted))

    def calls(self, calls: AllowedCalls) -> Form:
        only = self._behind(self._only(calls))
        return row(_maybe(END), only) if self._in_text else only

    def text_or_calls(self, wanted: Form, calls: AllowedCalls) -> Form:
        if self._in_text:
            return either([wanted, self.calls(calls)])
        return self._behind(either([_final(wanted), self._only(calls)]))

    def calls_in_text(self, calls: AllowedCalls) -> Form:
        """Allow text messages in the channel `commentary` before the calls."""
        last = either([_final(FREE), self._only(calls)])
        messages = self._behind(last, said=(ANALYSIS, COMMENTARY))
        return _message_before(messages, is_last=True) if self._in_text else messages

    def _only(self, calls: AllowedCalls) -> Form:
        """Match calls only. Models that treat `<|call|>` as an end token stop there, outside of the grammar."""
        assert self.tools is not None, "checked by `tools_in_use`"
        call = row(one_call(self.tools, calls.functions), _maybe(CALL))
        return listed(call, NEXT, 1, 1 if calls.at_most_one else None)

    def _behind(self, last: Form, said: tuple[str, ...] = (ANALYSIS,)) -> Form:
        """Match any number of messages with these heads, and then the last one."""
        opening = self.opening
        if opening.head and not opening.in_message:
            raise ValidationError(
                f"{PARAM} is not possible where the prompt ends in the head of a Harmony message", param=PARAM
            )
        heads = [fixed(head) for head in said if self.may_think or head != ANALYSIS]
        messages = last
        if heads:
            messages = row(listed(row(either(heads), _message_before(fixed(NEXT))), ""), last)
        if opening.in_message and opening.thinks:
            return row(_message_before(fixed(NEXT)), messages)
        return row(fixed(NEXT), messages) if self._in_text or opening.after_message else messages

    @property
    def _in_text(self) -> bool:
        """True if the answer begins within a message to the user."""
        return self.opening.in_message and not self.opening.thinks


def _final(wanted: Form) -> Form:
    return row(fixed(FINAL), wanted)


def _maybe(marker: str) -> Form:
    return either([fixed(marker), NOTHING])


def _message_before(behind: Form, *, is_last: bool = False) -> Form:
    """Match a message's free text, its end, and what follows; the end is optional if the message `is_last`."""
    return {
        "type": "triggered_tags",
        "triggers": [END],
        "tags": [{"type": "tag", "begin": END, "content": behind, "end": ""}],
        "excludes": [marker for marker in MARKERS if marker != END],
        "at_least_one": not is_last,
        "stop_after_first": True,
    }
