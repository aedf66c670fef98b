"""Arguments of a call in an earlier message: JSON text for OpenAI's clients, an object for templates."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from quire.inputs import ChatMessage

CUSTOM_INPUT = "input"
"""The one argument of the function that stands for a custom tool."""


def parsed_arguments(arguments: Any) -> dict[str, Any] | None:
    """Return the object that the text says, or that was given; None if it is no object, as after a cut."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_float=_number)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def with_valid_text(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with U+FFFD in place of each lone surrogate, which JSON can escape and no prompt can hold.

    The same object is returned if there is none.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return dict(json.loads(valid, parse_float=_number))
    return arguments


def _number(digits: str) -> float | str:
    """Return a number with a fraction or exponent; one beyond the range of a double as text of the same digits."""
    number = float(digits)
    return number if math.isfinite(number) else digits


def with_argument_texts(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with arguments as JSON text, for templates that join them to other text."""
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
    """Return the input of a custom tool from the arguments of its function: the text that the model meant."""
    parsed = parsed_arguments(arguments)
    if parsed is None:
        return arguments
    if parsed.get(CUSTOM_INPUT) is None and parsed.keys() <= {CUSTOM_INPUT}:
        return ""
    texts = [value for value in parsed.values() if isinstance(value, str)]
    if isinstance(parsed.get(CUSTOM_INPUT), str):
        return str(parsed[CUSTOM_INPUT])
    return texts[0] if len(parsed) == len(texts) == 1 else arguments
