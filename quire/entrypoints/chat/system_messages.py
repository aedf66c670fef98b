"""Forms of a conversation to try with a template that refuses the client's own.

A system message is moved to the nearest place where the template takes one. Turns of one role in a row are joined. A
user's text behind a call joins the result of the call, and where the template takes no results, they are a user's text.

Invariant: every arrangement has all texts of the conversation, the system's in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.entrypoints.chat.messages import RESULT_FIELD, Adjusted
from quire.inputs import ChatMessage

SYSTEM_ROLES = ("system", "developer")
ROLE_FIELD = "messages[].role"
TO_FRONT = "system, moved into the first message"
TO_USER = "user, for a template without system messages"
TURNS_FIELD = "messages[]"
JOINED_TURNS = "consecutive ones of one role are joined"
CONTENT_FIELD = "messages[].content"
JOINED_TO_RESULT = "text of the user is joined to a tool result"
RESULT_TO_USER = "result as text of the user"
TURNS = ("user", "assistant")
JOINED_FIELDS = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class Arrangement:
    """A conversation, and what was changed for it."""

    messages: list[ChatMessage]
    adjusted: Adjusted = field(default_factory=dict)


class SystemPlaces(Protocol):
    """Places where a template is known to show system messages."""

    def takes_first(self, role: str) -> bool: ...

    def takes_later(self, role: str) -> bool: ...


def arrangements(
    messages: list[ChatMessage], places: SystemPlaces, *, keeps_last: bool
) -> Iterator[Arrangement]:
    """Yield the ways to say this conversation, the client's own first where the template takes its system messages.

    Args:
        keeps_last: the last message stays in its place, because the answer continues it.
    """
    for placed in _placements(messages, places, keeps_last=keeps_last):
        yield placed
        turns = _with_turns_joined(placed.messages, keeps_last=keeps_last)
        adjusted = dict(placed.adjusted)
        if len(turns) < len(placed.messages):
            adjusted[TURNS_FIELD] = JOINED_TURNS
            yield Arrangement(turns, dict(adjusted))
        results = _with_texts_in_results(turns)
        if results != turns:
            yield Arrangement(results, {**adjusted, CONTENT_FIELD: JOINED_TO_RESULT})
        told = [_result_as_user(message) for message in placed.messages]
        if told != placed.messages:
            yield Arrangement(
                _with_turns_joined(told, keeps_last=keeps_last), {**adjusted, RESULT_FIELD: RESULT_TO_USER}
            )


def _placements(
    messages: list[ChatMessage], places: SystemPlaces, *, keeps_last: bool
) -> Iterator[Arrangement]:
    """Yield the conversation with its system messages in the places where the template may take them."""
    system = [index for index, message in enumerate(messages) if message["role"] in SYSTEM_ROLES]
    if keeps_last and system and system[-1] == len(messages) - 1:
        system.pop()
    if not system:
        yield Arrangement(messages)
        return
    role = messages[system[0]]["role"]
    takes_first = places.takes_first(role)
    if takes_first and all(index == 0 or places.takes_later(messages[index]["role"]) for index in system):
        yield Arrangement(messages)
    moved = frozenset(system)
    rest = [message for index, message in enumerate(messages) if index not in moved]
    text = _joined_text(*(messages[index]["content"] for index in system))
    if takes_first and system[-1] > 0:
        first: ChatMessage = {**messages[system[0]], "content": text}
        yield Arrangement([first, *rest], {ROLE_FIELD: TO_FRONT})
    yield Arrangement(_before_user(text, rest), {ROLE_FIELD: TO_USER})


def _with_turns_joined(messages: Sequence[ChatMessage], *, keeps_last: bool) -> list[ChatMessage]:
    """Return the messages, those of a user or of the assistant in a row as one."""
    kept: list[ChatMessage] = []
    for index, message in enumerate(messages):
        is_turn = bool(kept) and kept[-1]["role"] == message["role"] and message["role"] in TURNS
        # A template shows calls behind the text, and a prompt that ends in the text would lose them.
        ends_prompt = keeps_last and index == len(messages) - 1
        if is_turn and not (ends_prompt and "tool_calls" in kept[-1]):
            kept[-1] = _joined(kept[-1], message)
        else:
            kept.append(message)
    return kept


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Return two messages of one role as one; a name stays if it is that of both."""
    joined: ChatMessage = {"role": one["role"], "content": _joined_text(one["content"], other["content"])}
    for name in JOINED_FIELDS:
        if name in one or name in other:
            joined[name] = _joined_text(one.get(name, ""), other.get(name, ""))
    if "name" in one and one["name"] == other.get("name"):
        joined["name"] = one["name"]
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _with_texts_in_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages without those of a user behind a call: their text is in a result of the call."""
    kept: list[ChatMessage] = []
    before: list[str] = []
    for index, message in enumerate(messages):
        follows = messages[index + 1]["role"] if index + 1 < len(messages) else ""
        if message["role"] == "tool" and before:
            kept.append({**message, "content": _joined_text(*before, message["content"])})
            before.clear()
        elif message["role"] != "user" or not kept:
            kept.append(message)
        elif kept[-1]["role"] == "tool":
            kept[-1] = {**kept[-1], "content": _joined_text(kept[-1]["content"], message["content"])}
        elif "tool_calls" not in kept[-1]:
            kept.append(message)
        elif follows == "tool":
            before.append(message["content"])
        else:
            kept.append(_result_of(kept[-1]["tool_calls"][-1], message["content"]))
    return kept


def _result_of(call: dict[str, Any], text: str) -> ChatMessage:
    """Return a text as the result of a call that has none."""
    return {"role": "tool", "content": text, "tool_call_id": call["id"], "name": call["function"]["name"]}


def _result_as_user(message: ChatMessage) -> ChatMessage:
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _joined_text(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _before_user(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with this text before that of a user who begins, or as a user's message of its own."""
    if not text:
        return messages
    if not messages or messages[0]["role"] != "user":
        return [{"role": "user", "content": text}, *messages]
    first: ChatMessage = {**messages[0], "content": _joined_text(text, messages[0]["content"])}
    return [first, *messages[1:]]
