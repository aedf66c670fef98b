# SPDX-License-Identifier: Apache-2.0
"""Requests of the Responses API -> fields of a chat request.

Invariant: the server stores no responses, so stateful fields are rejected. Every text of the input is kept, in order.
Items without text for the model, such as calls of tools that run elsewhere, are ignored and named.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.chat.call_arguments import CUSTOM_INPUT
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from quire.entrypoints.openai.protocol.shapes import INCLUDED_LOGPROBS
from quire.entrypoints.openai.responses.protocol import (
    CALLS,
    FIXED_CALLS,
    OUTPUTS,
    REFERENCE,
    TEXT_FIELDS,
    TEXT_PARTS,
    ResponsesRequest,
)
from quire.entrypoints.openai.responses.tools import ResponseTools
from quire.entrypoints.openai.translation import given
from quire.errors import ValidationError

SAME_NAME = (
    "model", *SAMPLERS, "stop", "stop_token_ids", "priority", "cache_salt", "user", "chat_template_kwargs",
    "parallel_tool_calls", "structured_outputs",
)  # fmt: skip
CHAT_NAMES = {
    "messages": "input",
    "messages[]": "input[]",
    "messages[].content": "input[].content",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
    "messages[].role": "input[].role",
    "messages[].tool_calls[].function.arguments": "input[].arguments",
    "messages[].tool_call_id": "input[].call_id",
}  # Chat's field names -> those of the Responses API.
IMAGE_PART = "input_image"
STATEFUL = ("store", "background", "previous_response_id", "conversation", "prompt")
# Neutral values of these fields, besides null.
NEUTRAL = {"store": (None, False), "background": (None, False), "previous_response_id": (None, "")}
Fields = dict[str, Any]


def chat_fields(request: ResponsesRequest, tools: ResponseTools) -> Fields:
    """Return the fields of the chat request.

    Raises:
        ValidationError: the request is stateful, or an item or tool is not supported by a text model.
    """
    _check_stateless(request)
    messages = _Input(request, tools).messages
    fields: Fields = {"messages": messages, "stream": request.stream, **given(request, SAME_NAME)}
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = tools.chat
    if request.tool_choice is not None and (request.tools or request.tool_choice != "auto"):
        fields["tool_choice"] = _tool_choice(request.tool_choice, tools)
    if request.top_logprobs is not None or INCLUDED_LOGPROBS in (request.include or ()):
        if request.tools:  # the logprobs of a call's tokens would be mixed with those of the text
            raise ValidationError("logprobs are not supported together with tools", param="top_logprobs")
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    effort = (request.reasoning or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    form = (request.text or {}).get("format")
    return fields if form is None else {**fields, "response_format": _response_format(form)}


def idle_includes(request: ResponsesRequest) -> list[str]:
    """Return the unsupported values of `include`, as field names for `ignored`."""
    return [f"include[{value}]" for value in request.include or () if value != INCLUDED_LOGPROBS]


def _check_stateless(request: ResponsesRequest) -> None:
    for name in STATEFUL:
        if getattr(request, name) not in NEUTRAL.get(name, (None,)):
            raise ValidationError(
                f"{name} is not supported: this server keeps no responses; send the whole conversation as input",
                param=name,
            )
    if request.truncation not in (None, "disabled"):
        raise ValidationError(
            "truncation is not supported; leave it out or send disabled", param="truncation"
        )


class _Input:
    """Builder of a request's messages, item by item."""

    def __init__(self, request: ResponsesRequest, tools: ResponseTools) -> None:
        self.messages: list[Fields] = []
        self._notes = request.notes
        self._tools = tools
        if request.instructions:
            self.messages.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            self.messages.append({"role": "user", "content": request.input})
            return
        for index, item in enumerate(request.input):
            self._add(item, f"input.{index}")
        if not self.messages:
            raise ValidationError("input must have at least one item with text for the model", param="input")

    def _add(self, item: Fields, where: str) -> None:
        kind = item.get("type", "message")
        if not isinstance(kind, str) or not kind:
            raise ValidationError(f"{where}.type must be text", param=f"{where}.type")
        if kind == "message":
            self._add_message(_message(item, where))
        elif kind == "reasoning":
            thought = _thought(item, where)
            if thought:
                self._add_message({"role": "assistant", "content": "", "reasoning": thought})
        elif kind in CALLS:
            self._add_call(item, kind, where)
            if kind == "mcp_call":  # its result is part of the same item
                self.messages.append(_call_output(item, where))
        elif kind in OUTPUTS:
            self.messages.append(_call_output(item, where))
        else:
            self._leave_out(item, kind, where)

    def _add_message(self, message: Fields) -> None:
        """Add a message; preceding reasoning becomes part of it."""
        before = self.messages[-1] if self.messages else {}
        is_open = bool(before.get("reasoning")) and not before["content"] and "tool_calls" not in before
        if is_open and message["role"] == "assistant":
            self.messages[-1] = {**message, "reasoning": before["reasoning"] + message.get("reasoning", "")}
        else:
            self.messages.append(message)

    def _add_call(self, item: Fields, kind: str, where: str) -> None:
        """Add a call; calls of one turn form one message, also after text."""
        if not isinstance(item.get("call_id"), str | None):
            raise ValidationError(f"{where}.call_id must be text", param=f"{where}.call_id")
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        function = {"name": self._called_name(item, kind, where), "arguments": _arguments(item, kind)}
        call: Fields = {"type": "function", "function": function}
        if item.get("call_id") is not None:
            call["id"] = item["call_id"]
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _called_name(self, item: Fields, kind: str, where: str) -> str:
        if kind in FIXED_CALLS:
            return kind.removesuffix("_call")
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str):
            raise ValidationError(f"{where}.name must be text", param=f"{where}.name")
        if not isinstance(namespace, str | None):
            raise ValidationError(f"{where}.namespace must be text", param=f"{where}.namespace")
        return self._tools.shown_name(name, namespace)

    def _leave_out(self, item: Fields, kind: str, where: str) -> None:
        """Note an item without content for the model.

        Raises:
            ValidationError: its text would be lost, or it refers to a stored item.
        """
        if kind == REFERENCE:
            raise ValidationError(
                f"{where}.type {REFERENCE} is not supported: this server keeps no responses; send the item itself",
                param=f"{where}.type",
            )
        is_call = kind.endswith(("_call", "_call_output"))
        if not is_call and any(name in item for name in TEXT_FIELDS):
            raise ValidationError(
                f"{where}.type must be message, reasoning, a call or the output of a call, got {kind!r:.60}",
                param=f"{where}.type",
            )
        self._notes.ignore(f"input[].{kind}")


def _thought(item: Fields, where: str) -> str:
    """Return the text of a reasoning item of this server; encrypted content of others is ignored."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValidationError(f"{where}.content must be a list of texts", param=f"{where}.content")
    texts = [part.get("text", "") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValidationError(f"{where}.content must be a list of texts", param=f"{where}.content")
    return "".join(texts)


def _message(item: Fields, where: str) -> Fields:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise ValidationError(
            f"{where}.role must be user, assistant, system or developer", param=f"{where}.role"
        )
    content = item.get("content")
    if content is None and role == "assistant":  # a turn of calls only, as some clients send it
        content = ""
    return {"role": role, "content": _content(content, f"{where}.content")}


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(f"{where} must be text or a list of text parts", param=where)
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> Fields:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == IMAGE_PART:
        return dict(part)
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise ValidationError(
            f"{where} must be a part with text or an {IMAGE_PART}, got {kind!r:.40}", param=where
        )
    if not isinstance(part.get(name), str):
        raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return {"type": "text", "text": part[name]}


def _arguments(item: Fields, kind: str) -> Any:
    value = item.get(CALLS[kind])
    return {CUSTOM_INPUT: value if isinstance(value, str) else ""} if kind == "custom_tool_call" else value


def _call_output(item: Fields, where: str) -> Fields:
    if not isinstance(item.get("call_id"), str | None):
        raise ValidationError(f"{where}.call_id must be text", param=f"{where}.call_id")
    output = item.get("output")
    if isinstance(output, list):
        output = [_from_shell(part, f"{where}.output.{index}") for index, part in enumerate(output)]
    content = "" if output is None else _content(output, f"{where}.output")
    result = {"role": "tool", "content": content}
    return result if item.get("call_id") is None else {**result, "tool_call_id": item["call_id"]}


def _from_shell(part: Any, where: str) -> Any:
    """Convert a shell's output to a text part; parts with a type are returned unchanged."""
    if not isinstance(part, dict) or "type" in part or "stdout" not in part:
        return part
    written = [part["stdout"], part.get("stderr", "")]
    if not all(isinstance(text, str) for text in written):
        raise ValidationError(f"{where} must have stdout and stderr as text", param=where)
    return {"type": "text", "text": "\n".join(filter(None, written))}


def _tool_choice(choice: Any, tools: ResponseTools) -> Any:
    """Convert the choice to chat's form, with the model's tool name one level down."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": _chosen_name(choice, tools)}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {
            **choice,
            "tools": [allowed for entry in choice["tools"] for allowed in _allowed(entry, tools)],
        }
    return choice


def _allowed(entry: Any, tools: ResponseTools) -> list[Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return [entry]
    if entry.get("type") == "namespace":
        return [{"type": "function", "name": name} for name in tools.names_in(entry["name"])]
    return [{**entry, "name": _chosen_name(entry, tools)}]


def _chosen_name(choice: Fields, tools: ResponseTools) -> str:
    """Return the model's name of the chosen tool, with or without a namespace."""
    if not isinstance(choice.get("namespace"), str | None):
        raise ValidationError("the namespace of tool_choice must be text", param="tool_choice")
    if choice.get("namespace") is not None:
        return tools.shown_name(choice["name"], choice["namespace"])
    return tools.name_of(choice["name"])


def _response_format(form: Any) -> Any:
    """Convert the format to chat's form, where the schema is one level down."""
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return form
