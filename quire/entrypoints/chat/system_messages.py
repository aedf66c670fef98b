"""Places for system messages: as the client has them, or the nearest place where a template takes them.

Invariant: every arrangement has all texts of the conversation, the system's in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.entrypoints.chat.messages import Adjusted
from quire.inputs import ChatMessage

SYSTEM_ROLES = ("system", "developer")
ROLE_FIELD = "messages[].role"
TO_FRONT = "system, moved into the first message"
TO_USER = "user, for a template without system messages"


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
    joined = _joined(messages, moved)
    text = "\n\n".join(messages[index]["content"] for index in system if messages[index]["content"])
    if takes_first and system[-1] > 0:
        first: ChatMessage = {**messages[system[0]], "content": text}
        yield Arrangement([first, *rest], {ROLE_FIELD: TO_FRONT})
        if joined != rest:
            yield Arrangement([first, *joined], {ROLE_FIELD: TO_FRONT})
    for others in (rest, joined) if joined != rest else (rest,):
        yield Arrangement(_before_user(text, others), {ROLE_FIELD: TO_USER})


def _joined(messages: Sequence[ChatMessage], without: frozenset[int]) -> list[ChatMessage]:
    """Return the other messages, those of a user as one where only a system message stood between them."""
    kept: list[ChatMessage] = []
    is_behind_system = False
    for index, message in enumerate(messages):
        if index in without:
            is_behind_system = True
            continue
        if is_behind_system and kept and kept[-1]["role"] == message["role"] == "user":
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{message['content']}"}
        else:
            kept.append(message)
        is_behind_system = False
    return kept


def _before_user(text: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with this text before the first user's, or as a user's message of its own."""
    if not text:
        return messages
    for index, message in enumerate(messages):
        if message["role"] == "user":
            told: ChatMessage = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:index], told, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]
