"""Harmony, the language of gpt-oss: an answer is a row of messages, each with a channel and perhaps a recipient.

Reasoning is `<|channel|>analysis<|message|>...<|end|>`, a call is `<|start|>assistant<|channel|>commentary
to=functions.f <|constrain|>json<|message|>{...}<|call|>`, and what is for the user is in the channel `final`, or in
`commentary` without a recipient.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from quire.entrypoints.chat.formats.events import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.markers import Markers
from quire.entrypoints.chat.formats.syntax import json_object

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ROLE_END = re.compile(r"\s*to=[\w.\-]+\s*")
"""What may end a role that the prompt began: to whom the message goes."""
MAX_ROLE_END = 256
RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")


class Opening(NamedTuple):
    """Where an answer begins.

    Attributes:
        head: of the message that the prompt has begun; "" if it has begun none.
        in_message: the text of that message has begun, too.
        after_message: a whole message stands before the answer, so the next one begins with its role.
    """

    head: str = ""
    in_message: bool = False
    after_message: bool = False

    @staticmethod
    def of(prompt: str, continued: str = "") -> Opening:
        """Only the end of the prompt is looked at; `continued` is the message that the answer goes on with, if any."""
        _, _, begun = prompt.rstrip().rpartition(START)
        head, message, said = begun.partition(MESSAGE)
        if not continued and any(end in said for end in ENDS):
            return Opening(after_message=True)
        return Opening(head if CHANNEL in head else "", in_message=bool(message or continued))

    @property
    def thinks(self) -> bool:
        """Whether the message, of which the head is complete, is reasoning."""
        _, _, rest = self.head.partition(CHANNEL)
        return re.split(r"[\s<]", rest.lstrip(), maxsplit=1)[0] == "analysis"


def may_end_role(text: str) -> bool:
    """Whether the text is the beginning of what may end a role."""
    return "to=".startswith(text.strip()) or (
        len(text) <= MAX_ROLE_END and ROLE_END.fullmatch(f"{text.strip()}_") is not None
    )


class HarmonyReader:
    """Reads one answer; see `AnswerReader`.

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
        self._space: list[str] = []
        """What stands before the first head, if it is white space, or may end a role."""
        self._role_end = ""
        """The beginning of what may end a role, without white space before it."""
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
        if was_cut and (self._held or self._role_end):  # the beginning of a marker, or of a recipient
            self._held, self._space = "", []
        if not (self._is_head and self._head):
            self._take("".join([*self._space, self._held]), found)
        self._end_message(found, is_last=True, was_cut=was_cut)
        return found

    def _end_head(self) -> None:
        """The head is complete; its message follows."""
        self._thinks = Opening(self._head).thinks
        recipient = RECIPIENT.search(self._head)
        self._recipient = recipient[1] if recipient and self._has_tools else None
        self._is_head = False

    def _read_head(self, text: str, found: list[Event]) -> str:
        """Everything up to the message is its head; text without one is a message to the user."""
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
