"""Messages as templates want them: checked, with plain text content and parsed tool-call arguments.

Invariant: what leaves `checked_messages` holds only known fields, and every `content` is a string. A history is taken
as it comes where no text is lost, also one that was cut or was written by another server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.chat.call_arguments import CUSTOM_INPUT, parsed_arguments, with_valid_text
from quire.entrypoints.chat.function_messages import as_tool_messages
from quire.errors import ValidationError
from quire.inputs import ChatMessage, Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {"developer": "system"}
"""For templates that do not know the one role."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHT_PARTS = {
    "thinking": ("thinking",),
    "reasoning": ("reasoning", "text", "summary"),
    "reasoning_text": ("text",),
    "redacted_thinking": (),
}
"""Types of content parts that hold an assistant's reasoning, and the fields that may have it; one is encrypted."""
THOUGHT_FIELDS = frozenset(name for names in THOUGHT_PARTS.values() for name in names) - {"text"}
"""What other parts may have beside their text, without a meaning."""
ARGUMENTS_FIELD = "messages[].tool_calls[].function.arguments"
REPLACED_SURROGATES = "U+FFFD in place of lone surrogates"
RESULT_FIELD = "messages[].tool_call_id"
Adjusted = dict[str, str]
"""Fields of a conversation, to the values that were taken in place of the client's."""
PASSED_FIELDS = frozenset({"name", "tool_call_id", "reasoning", "reasoning_content"})
SILENT_FIELDS = frozenset({"annotations", "id", "object"})
"""What servers put into assistant messages and clients send back; no template reads it."""


def checked_messages(
    messages: Conversation, aliases: Mapping[str, str] = ROLE_ALIASES, adjusted: Adjusted | None = None
) -> list[ChatMessage]:
    """Return copies of `messages` in the one form that templates see.

    Args:
        aliases: roles, to those that the template has in their place.
        adjusted: receives what was changed.

    Raises:
        ValidationError: names the message and the field, for example `messages.2.content`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValidationError("messages must be a list with at least one message", param="messages")
    adjusted = {} if adjusted is None else adjusted
    modern = as_tool_messages(messages)
    checked = [
        _checked(message, f"messages.{index}", aliases, adjusted) for index, message in enumerate(modern)
    ]
    _note_lone_results(checked, adjusted)
    return checked


def _note_lone_results(messages: list[ChatMessage], adjusted: Adjusted) -> None:
    """Note a result of no call before it, as in a history that was cut; clients without ids are believed."""
    ids: set[str | None] = set()
    for message in messages:
        ids.update(call.get("id") for call in message.get("tool_calls", ()))
        is_known = (
            message.get("tool_call_id") in ids or None in ids if "tool_call_id" in message else bool(ids)
        )
        if message["role"] == "tool" and not is_known:
            adjusted[RESULT_FIELD] = "kept without a call"


def _checked(message: Any, where: str, aliases: Mapping[str, str], adjusted: Adjusted) -> ChatMessage:
    if not isinstance(message, dict):
        raise ValidationError(f"{where} must be an object with role and content", param=where)
    fields = {name: value for name, value in message.items() if value is not None}
    role = _checked_role(fields.pop("role", None), f"{where}.role")
    role = aliases.get(role, role)
    tool_calls = _checked_tool_calls(fields.pop("tool_calls", []), role, f"{where}.tool_calls", adjusted)
    refusal = fields.pop("refusal", "")
    may_lack_content = "content" in message or role in ("assistant", "tool")
    content = fields.pop("content", "" if may_lack_content else None)
    text, thought = _read_content(content, role, f"{where}.content")
    if not isinstance(refusal, str):
        raise ValidationError(f"{where}.refusal must be text", param=f"{where}.refusal")
    checked: ChatMessage = {"role": role, "content": "\n".join(filter(None, (text, refusal)))}
    for name, value in fields.items():
        if name in PASSED_FIELDS:
            if not isinstance(value, str):
                raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
            checked[name] = value
        elif name not in SILENT_FIELDS:
            raise ValidationError(f"{where} has an unknown field {name!r}", param=f"{where}.{name}")
    thought = checked.get("reasoning") or checked.get("reasoning_content") or thought
    if thought:  # one thing, which some templates read by the one name and some by the other
        checked["reasoning"] = checked["reasoning_content"] = thought
    if tool_calls:
        checked["tool_calls"] = tool_calls
    return checked


def _checked_role(role: Any, where: str) -> str:
    if role not in ROLES:
        raise ValidationError(f"{where} must be one of {', '.join(ROLES)}, got {role!r:.40}", param=where)
    return str(role)


def _read_content(content: Any, role: str, where: str) -> tuple[str, str]:
    """Return the text of a message, and the reasoning that stands among its parts."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise ValidationError(f"{where} must be text or a list of text parts", param=where)
    texts, thoughts = [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if role == "assistant" and isinstance(kind, str) and kind in THOUGHT_PARTS:
            thoughts.append(_thought(part, kind, f"{where}.{index}"))
        else:
            texts.append(_part_text(part, f"{where}.{index}"))
    return "\n".join(texts), "".join(thoughts)


def _thought(part: dict[str, Any], kind: str, where: str) -> str:
    """Return the reasoning of a part, in fields that are text or lists of text parts."""
    given = [name for name in THOUGHT_PARTS[kind] if part.get(name) is not None]
    return "".join(_joined_texts(part[name], f"{where}.{name}") for name in given)


def _joined_texts(value: Any, where: str) -> str:
    texts = []
    for piece in value if isinstance(value, list) else [value]:
        text = piece.get("text") if isinstance(piece, dict) and piece is not value else piece
        if not isinstance(text, str):
            raise ValidationError(f"{where} must be text or a list of text parts", param=where)
        texts.append(text)
    return "".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValidationError(
            f"{where} is no text part: this model takes text only, got {kind!r:.40}", param=where
        )
    unknown = part.keys() - {"type", field} - THOUGHT_FIELDS
    if unknown or not isinstance(part.get(field), str):
        raise ValidationError(f"{where} must hold exactly 'type' and a string {field!r}", param=where)
    return str(part[field])


def _checked_tool_calls(calls: Any, role: str, where: str, adjusted: Adjusted) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ValidationError(f"{where} must be a list in a message of the assistant", param=where)
    return [_checked_tool_call(call, f"{where}.{index}", adjusted) for index, call in enumerate(calls)]


def _checked_tool_call(call: Any, where: str, adjusted: Adjusted) -> dict[str, Any]:
    kind = call.get("type") if isinstance(call, dict) else None
    if kind not in (None, "function", "custom"):
        raise ValidationError(f"{where}.type must be function or custom", param=f"{where}.type")
    function = call.get(kind or "function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationError(f"{where} needs a {kind or 'function'} with a name", param=where)
    if not isinstance(call.get("id"), str | None):
        raise ValidationError(f"{where}.id must be text", param=f"{where}.id")
    given = {CUSTOM_INPUT: function["input"]} if isinstance(function.get("input"), str) else None
    arguments = given if kind == "custom" else parsed_arguments(function.get("arguments"))
    if arguments is None:
        adjusted[ARGUMENTS_FIELD] = "{}"
    elif isinstance(function.get("arguments"), str):
        valid = with_valid_text(arguments)
        if valid is not arguments:
            arguments, adjusted[ARGUMENTS_FIELD] = valid, REPLACED_SURROGATES
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked
