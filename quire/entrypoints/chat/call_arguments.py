# SPDX-License-Identifier: Apache-2.0
"""Tool-call ids and arguments in earlier messages.

Arguments are JSON text for OpenAI's clients and an object for templates. Invariant: a call and its result have the same
id in a prompt, calls with different ids keep different ones, and the same conversation always gets the same ids.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quire.inputs import ChatMessage

ALPHABET = string.ascii_letters + string.digits
NUM_CHARS = 9  # templates of Mistral models reject any other length

CUSTOM_INPUT = "input"  # The only argument of the function that stands for a custom tool.


def new_call_id() -> str:
    """Return a random id that every known template accepts."""
    return "".join(secrets.choice(ALPHABET) for _ in range(NUM_CHARS))


@dataclass(frozen=True)
class IdForm:
    """Ids that a template accepts. Ids that do not match `fits`, and missing ones, are replaced.

    Args:
        counted: an id is made of the function's name and the number of the call, as in Kimi K2.
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
# Template text that identifies the id form its model was trained on, whether or not the template checks it.
EVIDENCE = (("[TOOL_CALLS]", NINE), ("<|tool_call_argument_begin|>", COUNTED))


def forms_of(template: str) -> tuple[IdForm, ...]:
    """Return the id forms to try with this template, in order."""
    taught = tuple(form for words, form in EVIDENCE if words in template)
    return taught or (ANY, NINE)


def have_calls(messages: Sequence[ChatMessage]) -> bool:
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def with_call_ids(messages: Sequence[ChatMessage], form: IdForm) -> list[ChatMessage]:
    """Return the messages with ids of this form; a result without an id belongs to the first open call of its name."""
    writer = _CallIdWriter(messages, form)
    return [writer.written(message, f"#{index}") for index, message in enumerate(messages)]


class _CallIdWriter:
    def __init__(self, messages: Sequence[ChatMessage], form: IdForm) -> None:
        self._form = form
        self._num_calls = 0
        self._open: dict[str, str] = {}  # ids of calls without a result -> name
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


def parsed_arguments(arguments: Any) -> dict[str, Any] | None:
    """Return arguments as an object; None if the text is not a JSON object, for instance because it was truncated."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_float=_number)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def with_valid_text(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with U+FFFD in place of lone surrogates, which JSON can escape but no prompt can hold.

    Returns the same object if there are none.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return dict(json.loads(valid, parse_float=_number))
    return arguments


def _number(digits: str) -> float | str:
    """Return a number with a fraction or exponent; beyond the range of a double, its digits as text."""
    number = float(digits)
    return number if math.isfinite(number) else digits


def with_argument_texts(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with arguments as JSON text, for templates that concatenate them with text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from its function's arguments."""
    parsed = parsed_arguments(arguments)
    if parsed is None:
        return arguments
    if parsed.get(CUSTOM_INPUT) is None and parsed.keys() <= {CUSTOM_INPUT}:
        return ""
    texts = [value for value in parsed.values() if isinstance(value, str)]
    if isinstance(parsed.get(CUSTOM_INPUT), str):
        return str(parsed[CUSTOM_INPUT])
    return texts[0] if len(parsed) == len(texts) == 1 else arguments
