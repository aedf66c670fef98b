"""Harmony's answers as constraints: reasoning in messages of its own, then a message to the user, or calls.

Invariant: no text of a message that is free holds a marker, so the message ends where the grammar says.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.entrypoints.chat.answer_grammar import Calls
from quire.entrypoints.chat.formats.constraint import NOTHING, Form, either, fixed, listed, row
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.harmony import CHANNEL, MARKERS, MESSAGE, START, Opening
from quire.entrypoints.chat.tool_grammar import free_text, one_call
from quire.errors import ValidationError
from quire.structured_output.params import PARAM

END, CALL = "<|end|>", "<|call|>"
ANALYSIS, COMMENTARY, FINAL = (
    f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "commentary", "final")
)
NEXT = f"{START}assistant"
"""Begins another message."""
FREE = free_text(MARKERS)


@dataclass(frozen=True)
class HarmonyGrammar:
    """The grammar of an answer in Harmony; see `AnswerGrammar`.

    Args:
        tools: how calls are written.
        opening: where the answer begins.
        may_think: messages of reasoning may come first.
    """

    tools: ToolFormat | None
    opening: Opening
    may_think: bool = True

    def text(self, wanted: Form) -> Form:
        return wanted if self._in_text else self._behind(_final(wanted))

    def calls(self, calls: Calls) -> Form:
        only = self._behind(self._only(calls))
        return row(_maybe(END), only) if self._in_text else only

    def text_or_calls(self, wanted: Form, calls: Calls) -> Form:
        if self._in_text:
            return either([wanted, self.calls(calls)])
        return self._behind(either([_final(wanted), self._only(calls)]))

    def calls_in_text(self, calls: Calls) -> Form:
        """What a model says before its calls is a message as reasoning is, in another channel."""
        last = either([_final(FREE), self._only(calls)])
        messages = self._behind(last, said=(ANALYSIS, COMMENTARY))
        return _message_before(messages, is_last=True) if self._in_text else messages

    def _only(self, calls: Calls) -> Form:
        """A call's end ends the answer of models that know it as an end, and then no grammar sees it."""
        assert self.tools is not None, "who offers tools has looked for their format"
        call = row(one_call(self.tools, calls.functions), _maybe(CALL))
        return listed(call, NEXT, 1, 1 if calls.at_most_one else None)

    def _behind(self, last: Form, said: tuple[str, ...] = (ANALYSIS,)) -> Form:
        """Any number of messages with these heads, and the last."""
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
        """Whether the answer begins within a message to the user."""
        return self.opening.in_message and not self.opening.thinks


def _final(wanted: Form) -> Form:
    return row(fixed(FINAL), wanted)


def _maybe(marker: str) -> Form:
    return either([fixed(marker), NOTHING])


def _message_before(behind: Form, *, is_last: bool = False) -> Form:
    """The free text of a message, its end, and what comes behind it; unless the message `is_last`."""
    return {
        "type": "triggered_tags",
        "triggers": [END],
        "tags": [{"type": "tag", "begin": END, "content": behind, "end": ""}],
        "excludes": [marker for marker in MARKERS if marker != END],
        "at_least_one": not is_last,
        "stop_after_first": True,
    }
