"""From a request of the Responses API to the fields of a chat request.

Invariant: the server keeps no response, so what asks it to remember one is refused; every text of the input reaches
the chat, in its order.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.chat.call_arguments import parsed_arguments
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from quire.entrypoints.openai.protocol.shapes import INCLUDED_LOGPROBS
from quire.entrypoints.openai.responses.protocol import TEXT_PARTS, ResponsesRequest
from quire.entrypoints.openai.translation import check_call_id, given
from quire.errors import ValidationError

SAME_NAME = (
    "model", *SAMPLERS, "stop", "stop_token_ids", "priority", "cache_salt", "user", "chat_template_kwargs",
    "parallel_tool_calls", "structured_outputs",
)  # fmt: skip
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
}
"""Chat's names of fields, to those of the Responses API."""
STATEFUL = ("store", "background", "previous_response_id", "conversation", "prompt")
NEUTRAL = {"store": (None, False), "background": (None, False), "previous_response_id": (None, "")}
"""Values of these fields that ask for nothing, besides null."""
FUNCTION = ("name", "description", "parameters", "strict")
Fields = dict[str, Any]


def chat_fields(request: ResponsesRequest) -> Fields:
    """All of the chat request.

    Raises:
        ValidationError: the request needs a memory, or an item or tool is not one that a text model takes.
    """
    _check_stateless(request)
    fields: Fields = {"messages": _messages(request), "stream": request.stream, **given(request, SAME_NAME)}
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None and (request.tools or request.tool_choice != "auto"):
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.top_logprobs is not None or INCLUDED_LOGPROBS in (request.include or ()):
        if request.tools:  # the tokens of a call would stand among those of the text
            raise ValidationError("logprobs are not supported together with tools", param="top_logprobs")
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    effort = (request.reasoning or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    form = (request.text or {}).get("format")
    return fields if form is None else {**fields, "response_format": _response_format(form)}


def idle_includes(request: ResponsesRequest) -> list[str]:
    """What the request asks to be included that no answer here has, by the names under which that is told."""
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


def _messages(request: ResponsesRequest) -> list[Fields]:
    messages: list[Fields] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
        return messages
    for index, item in enumerate(request.input):
        _add_item(messages, item, f"input.{index}")
    if not messages:
        raise ValidationError("input must have at least one item", param="input")
    return messages


def _add_item(messages: list[Fields], item: Fields, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, _message(item, where))
    elif kind == "function_call":
        _add_call(messages, item, where)
    elif kind == "function_call_output":
        messages.append(_call_output(messages, item, where))
    elif kind == "reasoning":
        thought = _thought(item, where)
        if thought:
            _add_message(messages, {"role": "assistant", "content": "", "reasoning": thought})
    else:
        raise ValidationError(
            f"{where}.type must be message, function_call or function_call_output, got {kind!r:.60}",
            param=f"{where}.type",
        )


def _add_message(messages: list[Fields], message: Fields) -> None:
    """What was reasoned is part of the message after it."""
    before = messages[-1] if messages else {}
    is_open = bool(before.get("reasoning")) and not before["content"] and "tool_calls" not in before
    if is_open and message["role"] == "assistant":
        messages[-1] = {**message, "reasoning": before["reasoning"] + message.get("reasoning", "")}
    else:
        messages.append(message)


def _thought(item: Fields, where: str) -> str:
    """The text of an item that this server gave; what others encrypted is not to be read."""
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
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(f"{where} must be text or a list of text parts", param=where)
    return [_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> Fields:
    kind = part.get("type") if isinstance(part, dict) else None
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise ValidationError(
            f"{where} is no text part: this model takes text only, got {kind!r:.40}", param=where
        )
    if not isinstance(part.get(name), str):
        raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return {"type": "text", "text": part[name]}


def _add_call(messages: list[Fields], item: Fields, where: str) -> None:
    """Calls of one answer are one message, also where text came before them."""
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
    parsed_arguments(item["arguments"], f"{where}.arguments")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_output(messages: list[Fields], item: Fields, where: str) -> Fields:
    if not isinstance(item.get("call_id"), str):
        raise ValidationError(f"{where}.call_id must be text", param=f"{where}.call_id")
    check_call_id(messages, item["call_id"], f"{where}.call_id")
    content = _content(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _tool(tool: Fields, where: str) -> Fields:
    if tool.get("type") != "function":
        raise ValidationError(
            f"{where}.type must be function, the only kind of tool that this server has",
            param=f"{where}.type",
        )
    function = {name: tool[name] for name in FUNCTION if name in tool}
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValidationError(f"{where}.name must be text", param=f"{where}.name")
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """A named function is an object of one level here, and of two in chat."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(form: Any) -> Any:
    """A schema is beside its name here, and one level down in chat."""
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return form
