"""Messages as OpenAI had them before tools: `function_call` of the assistant, and the role `function`.

Invariant: a call and its result get the same id, which they have not of their own and which some templates want.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.entrypoints.chat.call_arguments import parsed_arguments
from quire.errors import ValidationError


def as_tool_messages(messages: Iterable[Any]) -> list[Any]:
    """The same conversation with tool calls; messages of other kinds, good or bad, are left as they are.

    Raises:
        ValidationError: a call has no name, or a result belongs to no call.
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
    arguments = parsed_arguments(function.get("arguments"), f"{where}.arguments")
    ids[function["name"]] = call_id = (
        f"call{index:05}"  # nine letters and digits, as Mistral's templates want
    )
    called = {"name": function["name"], "arguments": arguments}
    return {**rest, "tool_calls": [{"id": call_id, "type": "function", "function": called}]}


def _result(message: dict[str, Any], where: str, ids: dict[str, str]) -> dict[str, Any]:
    name = message.get("name")
    if not isinstance(name, str) or name not in ids:
        raise ValidationError(
            f"{where}.name must be that of a function that a message before it calls, got {name!r:.80}",
            param=f"{where}.name",
        )
    return {**message, "role": "tool", "tool_call_id": ids[name]}
