"""Ids of tool calls: the ones this server makes, and the ones that a template is given for an earlier call.

Invariant: a call and its result have the same id in a prompt, two calls of different ids have different ones, and the
same conversation always gets the same ids.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quire.inputs import ChatMessage

ALPHABET = string.ascii_letters + string.digits
NUM_CHARS = 9  # templates of Mistral models refuse any other number


def new_call_id() -> str:
    """Return a random id in the form that every known template takes."""
    return "".join(secrets.choice(ALPHABET) for _ in range(NUM_CHARS))


@dataclass(frozen=True)
class IdForm:
    """The ids that a template takes. Ids that do not match `fits`, and absent ones, are replaced.

    Args:
        counted: an id is made of the function's name and the number of the call, as Kimi K2 writes it.
    """

    fits: re.Pattern[str]
    counted: bool = False

    def make(self, seed: str, name: str, number: int, taken: Collection[str]) -> str:
        if self.counted:
            return f"functions.{name}:{number}"
        attempts = (_digest(f"{attempt}/{seed}") for attempt in itertools.count())
        return next(made for made in attempts if made not in taken)


ANY = IdForm(re.compile(r"(?s).*"))
NINE = IdForm(re.compile(f"[A-Za-z0-9]{{{NUM_CHARS}}}"))
COUNTED = IdForm(re.compile(r"(?s)functions\..+:\d+"), counted=True)
EVIDENCE = (("[TOOL_CALLS]", NINE), ("<|tool_call_argument_begin|>", COUNTED))
"""Words of a template whose model was taught one form of ids, whether the template checks it or not."""


def forms_of(template: str) -> tuple[IdForm, ...]:
    """Return the forms to try with this template, in their order."""
    taught = tuple(form for words, form in EVIDENCE if words in template)
    return taught or (ANY, NINE)


def have_calls(messages: Sequence[ChatMessage]) -> bool:
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def with_call_ids(messages: Sequence[ChatMessage], form: IdForm) -> list[ChatMessage]:
    """Return the messages with ids of this form; a result without an id belongs to the first open call of its name."""
    writer = _IdWriter(messages, form)
    return [writer.written(message, f"#{index}") for index, message in enumerate(messages)]


class _IdWriter:
    def __init__(self, messages: Sequence[ChatMessage], form: IdForm) -> None:
        self._form = form
        self._num_calls = 0
        self._open: dict[str, str] = {}  # id to name of each call without a result
        self._by_name: dict[str, dict[str, None]] = {}  # the same ids by name, in order
        self._new: dict[str, str] = {}
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        given = [call.get("id") for call in calls] + [message.get("tool_call_id") for message in messages]
        self._taken = {one for one in given if one is not None and form.fits.fullmatch(one)}

    def written(self, message: ChatMessage, place: str) -> ChatMessage:
        if "tool_calls" in message:
            self._open, self._by_name = {}, {}
            calls = [self._call(call, f"{place}/{index}") for index, call in enumerate(message["tool_calls"])]
            return {**message, "tool_calls": calls}
        if message["role"] == "tool":
            return {**message, "tool_call_id": self._result_id(message, place)}
        return message

    def _call(self, call: dict[str, Any], place: str) -> dict[str, Any]:
        name = str(call["function"]["name"])
        call_id = self._id(call.get("id"), name, place, self._num_calls)
        self._num_calls += 1
        self._open[call_id] = name
        self._by_name.setdefault(name, {})[call_id] = None
        return {**call, "id": call_id}

    def _result_id(self, message: ChatMessage, place: str) -> str:
        given, name = message.get("tool_call_id"), str(message.get("name", ""))
        if given is not None:
            answered = self._new.get(given) or self._id(given, name, place, self._num_calls)
        else:
            first = next(iter(self._by_name.get(name) or self._open), None)
            answered = self._id(None, name, place, self._num_calls) if first is None else first
        self._by_name.get(self._open.pop(answered, ""), {}).pop(answered, None)
        return answered

    def _id(self, given: str | None, name: str, place: str, number: int) -> str:
        if given is not None and self._form.fits.fullmatch(given):
            return given
        if given is not None and given in self._new and not self._form.counted:
            return self._new[given]
        made = self._form.make(place if given is None else given, name, number, self._taken)
        self._taken.add(made)
        if given is not None:
            self._new[given] = made
        return made


def _digest(seed: str) -> str:
    number = int.from_bytes(hashlib.sha256(seed.encode(errors="surrogatepass")).digest())
    chars = []
    for _ in range(NUM_CHARS):
        number, digit = divmod(number, len(ALPHABET))
        chars.append(ALPHABET[digit])
    return "".join(chars)
