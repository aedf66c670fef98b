"""Messages as templates want them: checked, with plain text content and parsed tool-call arguments.

Invariant: what leaves `checked_messages` holds only known fields, and every `content` is a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.chat.call_arguments import parsed_arguments
from quire.entrypoints.chat.function_messages import as_tool_messages
from quire.errors import ValidationError
from quire.inputs import ChatMessage, Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {"developer": "system"}
"""For templates that do not know the one role."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
PASSED_FIELDS = frozenset({"name", "tool_call_id", "reasoning", "reasoning_content"})
SILENT_FIELDS = frozenset({"refusal", "annotations", "id", "object"})
"""What servers put into assistant messages and clients send back; no template reads it."""


def checked_messages(messages: Conversation, aliases: Mapping[str, str] = ROLE_ALIASES) -> list[ChatMessage]:
    """Copies of `messages` in the one form that templates see.

    Args:
        aliases: roles, to those that the template has in their place.

    Raises:
        ValidationError: names the message and the field, for example `messages.2.content`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValidationError("messages must be a list with at least one message", param="messages")
    modern = as_tool_messages(messages)
    checked = [_checked(message, f"messages.{index}", aliases) for index, message in enumerate(modern)]
    _check_results(checked)
    return checked


def _check_results(messages: list[ChatMessage]) -> None:
    """A tool's result answers a call that an earlier message makes; clients without ids are believed."""
    calls: list[str | None] = []
    for index, message in enumerate(messages):
        calls += [call.get("id") for call in message.get("tool_calls", [])]
        call_id = message.get("tool_call_id")
        if message["role"] != "tool":
            continue
        if not calls:
            raise ValidationError(
                f"messages.{index} is the result of a tool, but no message before it calls one",
                param=f"messages.{index}",
            )
        if call_id is not None and None not in calls and call_id not in calls:
            raise ValidationError(
                f"messages.{index}.tool_call_id {call_id!r:.80} is the id of no call before it",
                param=f"messages.{index}.tool_call_id",
            )


def _checked(message: Any, where: str, aliases: Mapping[str, str]) -> ChatMessage:
    if not isinstance(message, dict):
        raise ValidationError(f"{where} must be an object with role and content", param=where)
    fields = {name: value for name, value in message.items() if value is not None}
    role = _checked_role(fields.pop("role", None), f"{where}.role")
    role = aliases.get(role, role)
    tool_calls = _checked_tool_calls(fields.pop("tool_calls", []), role, f"{where}.tool_calls")
    content = fields.pop("content", "" if tool_calls or "content" in message else None)
    checked: ChatMessage = {"role": role, "content": _as_text(content, f"{where}.content")}
    for name, value in fields.items():
        if name in PASSED_FIELDS:
            if not isinstance(value, str):
                raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
            checked[name] = value
        elif name not in SILENT_FIELDS:
            raise ValidationError(f"{where} has an unknown field {name!r}", param=f"{where}.{name}")
    thought = checked.get("reasoning") or checked.get("reasoning_content")
    if thought:  # one thing, which some templates read by the one name and some by the other
        checked["reasoning"] = checked["reasoning_content"] = thought
    if tool_calls:
        checked["tool_calls"] = tool_calls
    return checked


def _checked_role(role: Any, where: str) -> str:
    if role not in ROLES:
        raise ValidationError(f"{where} must be one of {', '.join(ROLES)}, got {role!r:.40}", param=where)
    return str(role)


def _as_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{where}.{index}") for index, part in enumerate(content))
    raise ValidationError(f"{where} must be text or a list of text parts", param=where)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValidationError(
            f"{where} is no text part: this model takes text only, got {kind!r:.40}", param=where
        )
    unknown = part.keys() - {"type", field}
    if unknown or not isinstance(part.get(field), str):
        raise ValidationError(f"{where} must hold exactly 'type' and a string {field!r}", param=where)
    return str(part[field])


def _checked_tool_calls(calls: Any, role: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ValidationError(f"{where} must be a list in a message of the assistant", param=where)
    return [_checked_tool_call(call, f"{where}.{index}") for index, call in enumerate(calls)]


def _checked_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} needs a function with a name", param=where)
    if call.get("type") not in (None, "function"):
        raise ValidationError(f"{where}.type must be function", param=f"{where}.type")
    if not isinstance(call.get("id"), str | None):
        raise ValidationError(f"{where}.id must be text", param=f"{where}.id")
    arguments = parsed_arguments(function.get("arguments"), f"{where}.function.arguments")
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked
