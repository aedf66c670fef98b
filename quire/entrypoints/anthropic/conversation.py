"""From Anthropic's request to the fields of a chat request.

Invariant: every text of the request reaches the chat, in its order; a block that is no text, or a tool that is not the
client's own, is refused by its place. What cannot change the answer is left out and named.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.anthropic.protocol import (
    MAX_USER_CHARS,
    THINKS,
    CountTokensRequest,
    MessagesRequest,
)
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from quire.entrypoints.openai.translation import check_call_id, given
from quire.errors import ValidationError

SAME_NAME = ("model", *SAMPLERS, "priority", "cache_salt")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CHAT_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
}
"""Chat's names of fields, to Anthropic's."""
Fields = dict[str, Any]


def prompt_fields(request: CountTokensRequest) -> Fields:
    """The chat fields that decide the prompt.

    Raises:
        ValidationError: a message, block or tool has no form that a text model takes.
    """
    _response_format(request)
    _check_user((request.metadata or {}).get("user_id"))
    messages = [*_system(request.system), *_conversation(request.messages)]
    fields: Fields = {"messages": messages, **given(request, ("model", "chat_template_kwargs"))}
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    if request.thinking is not None:
        fields["enable_thinking"] = _enable_thinking(request.thinking)
    effort = (request.output_config or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    if _is_begun(messages[-1]):  # Anthropic's way to let the model go on in words that it is given
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields


def chat_fields(request: MessagesRequest) -> Fields:
    """All of the chat request. Raises ValidationError as `prompt_fields` does."""
    fields = {**prompt_fields(request), **given(request, SAME_NAME)}
    fields |= {"max_tokens": request.max_tokens, "stream": request.stream}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    form = _response_format(request)
    if form is not None:
        fields["response_format"] = form
    user = (request.metadata or {}).get("user_id")
    return {**fields, "user": user} if user is not None else fields


def _check_user(user: Any) -> None:
    if user is not None and (not isinstance(user, str) or len(user) > MAX_USER_CHARS):
        raise ValidationError(
            f"metadata.user_id must be text of at most {MAX_USER_CHARS} characters", param="metadata.user_id"
        )


def _system(system: str | list[dict[str, Any]] | None) -> list[Fields]:
    if not system:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    return [{"role": "system", "content": _texts(blocks, "system")}]


def _conversation(messages: list[dict[str, Any]]) -> list[Fields]:
    translated: list[Fields] = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise ValidationError(f"{where}.role must be user or assistant", param=f"{where}.role")
        if isinstance(content, str):
            translated.append({"role": role, "content": content})
        elif isinstance(content, list):
            if role == "assistant":
                translated += _of_assistant(content, f"{where}.content")
            else:
                translated += _of_user(content, f"{where}.content", translated)
        else:
            raise ValidationError(
                f"{where}.content must be text or a list of blocks", param=f"{where}.content"
            )
    return translated


def _of_assistant(blocks: list[Any], where: str) -> list[Fields]:
    texts, calls, thoughts = [], [], []
    for index, block in enumerate(blocks):
        place, kind = f"{where}.{index}", _kind(block)
        if kind == "tool_use":
            calls.append(_call(block, place))
        elif kind == "thinking":
            thoughts.append(_thought(block, place))
        elif kind != "redacted_thinking":  # only its maker can read it
            texts += _texts([block], place, numbered=False)
    message: Fields = {"role": "assistant", "content": texts or ""}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return [{**message, "tool_calls": calls}] if calls else [message]


def _of_user(blocks: list[Any], where: str, before: list[Fields]) -> list[Fields]:
    """Results of tools are messages of their own; the texts between two of them are one message."""
    messages: list[Fields] = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        if _kind(block) == "tool_result":
            messages.append(_result(block, place, before))
            continue
        text = _texts([block], place, numbered=False)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _thought(block: Any, where: str) -> str:
    if not isinstance(block.get("thinking"), str):
        raise ValidationError(f"{where}.thinking must be text", param=f"{where}.thinking")
    return str(block["thinking"])


def _enable_thinking(thinking: Fields) -> bool:
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in THINKS:
        raise ValidationError(f"thinking.type must be one of {', '.join(THINKS)}", param="thinking.type")
    return THINKS[kind]


def _call(block: Any, where: str) -> Fields:
    name, arguments = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValidationError(f"{where} must hold a name and an input that is an object", param=where)
    if not isinstance(block.get("id", ""), str):
        raise ValidationError(f"{where}.id must be text", param=f"{where}.id")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Any, where: str, before: list[Fields]) -> Fields:
    content = block.get("content", "")
    if not isinstance(block.get("tool_use_id"), str):
        raise ValidationError(f"{where}.tool_use_id must be text", param=f"{where}.tool_use_id")
    check_call_id(before, block["tool_use_id"], f"{where}.tool_use_id")
    if isinstance(content, list):
        content = _texts(content, f"{where}.content")
    elif not isinstance(content, str):
        raise ValidationError(f"{where}.content must be text or a list of blocks", param=f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _texts(blocks: list[Any], where: str, *, numbered: bool = True) -> list[Fields]:
    """Text parts of a chat message; each block's other fields concern caching and citations."""
    texts = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}" if numbered else where
        if _kind(block) != "text":
            raise ValidationError(
                f"{place} is no text block: this model takes text only, got {_kind(block)!r:.40}", param=place
            )
        if not isinstance(block.get("text"), str):
            raise ValidationError(f"{place}.text must be text", param=f"{place}.text")
        texts.append({"type": "text", "text": block["text"]})
    return texts


def _tool(tool: Fields, where: str) -> Fields:
    if tool.get("type") not in (None, "custom"):
        raise ValidationError(
            f"{where}.type {tool['type']!r:.60} is a tool that runs on Anthropic's servers; this server has none",
            param=f"{where}.type",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ValidationError(f"{where} must hold a name and an input_schema that is an object", param=where)
    function = {"name": tool["name"], "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if not isinstance(tool.get("strict"), bool | None):
        raise ValidationError(f"{where}.strict must be true or false", param=f"{where}.strict")
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Fields) -> Fields:
    kind = choice.get("type")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise ValidationError(
            "tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice"
        )
    parallel = not single
    if kind == "tool" and isinstance(choice.get("name"), str):
        named = {"type": "function", "function": {"name": choice["name"]}}
        return {"tool_choice": named, "parallel_tool_calls": parallel}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise ValidationError(
            "tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice.type"
        )
    return {"tool_choice": TOOL_CHOICES[kind], "parallel_tool_calls": parallel}


def _response_format(request: CountTokensRequest) -> Fields | None:
    form = (request.output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise ValidationError("output_config.format.type must be json_schema", param="output_config.format")
    if not isinstance(form.get("schema"), dict):
        raise ValidationError("output_config.format.schema must be an object", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}


def _is_begun(message: Fields) -> bool:
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None
