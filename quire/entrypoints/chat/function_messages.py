"""Messages as OpenAI had them before tools: `function_call` of the assistant, and the role `function`.

Invariant: a call and its result get the same id, which they have not of their own and which some templates want.
A result of a function that no message calls is a result without an id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.errors import ValidationError


def as_tool_messages(messages: Iterable[Any]) -> list[Any]:
    """Return the same conversation with tool calls; messages of other kinds, good or bad, are left as they are.

    Raises:
        ValidationError: a call or a result has no name.
    """
    ids: dict[str, str] = {}
    return [_modern(message, index, ids) for index, message in enumerate(messages)]


def _modern(message: Any, index: int, ids: dict[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        return _result(message, f"messages.{index}", ids)
    if message.get("function_call") is None:
        return message
    return _call(message, index, ids)


def _call(message: dict[str, Any], index: int, ids: dict[str, str]) -> dict[str, Any]:
    where = f"messages.{index}.function_call"
    rest = dict(message)
    function = rest.pop("function_call")
    if message.get("role") != "assistant" or message.get("tool_calls") not in (None, []):
        raise ValidationError(f"{where} belongs to an assistant's message without tool_calls", param=where)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} must be an object with name and arguments", param=where)
    ids[function["name"]] = call_id = (
        f"call{index:05}"  # nine letters and digits, as Mistral's templates want
    )
    called = {"name": function["name"], "arguments": function.get("arguments")}
    return {**rest, "tool_calls": [{"id": call_id, "type": "function", "function": called}]}


def _result(message: dict[str, Any], where: str, ids: dict[str, str]) -> dict[str, Any]:
    name = message.get("name")
    if not isinstance(name, str):
        raise ValidationError(
            f"{where}.name must be the name of a function, got {name!r:.80}", param=f"{where}.name"
        )
    known = {"tool_call_id": ids[name]} if name in ids else {}
    return {**message, "role": "tool", **known}
