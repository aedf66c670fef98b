# SPDX-License-Identifier: Apache-2.0
"""Anthropic's requests -> fields of a chat request.

Invariant: every text of the request is kept, in order. A block other than text or an image is rejected by its path.
Blocks and tools of Anthropic's own servers, and fields without effect, are ignored and named.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.anthropic.protocol import (
    MAX_USER_CHARS,
    OWN_TOOLS,
    SERVER_BLOCKS,
    SERVER_RESULT,
    THINKS,
    CountTokensRequest,
    MessagesRequest,
)
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from quire.entrypoints.openai.translation import given
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
    "messages[].tool_calls[].function.arguments": "messages[].content[].input",
    "user": "metadata",
    "messages[].tool_call_id": "messages[].content[].tool_use_id",
}  # Chat's field names -> Anthropic's.
ROLES = ("user", "assistant", "system")
# Types of text blocks -> the field that holds the text.
TEXT_BLOCKS = {"text": "text", "compaction": "content"}
Fields = dict[str, Any]


def prompt_fields(request: CountTokensRequest) -> Fields:
    """Return the chat fields that determine the prompt.

    Raises:
        ValidationError: a message, block or tool is not supported by a text model.
    """
    _response_format(request)
    _check_user((request.metadata or {}).get("user_id"))
    messages = [*_system(request.system), *_Conversation(request.messages, request.notes).chat]
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
    if _continues_answer(messages[-1]):  # Anthropic's form of continuing a given beginning of the answer
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields


def chat_fields(request: MessagesRequest) -> Fields:
    """Return all fields of the chat request. Raises ValidationError as `prompt_fields` does."""
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
    parts = [part for index, block in enumerate(blocks) for part in _text_parts(block, f"system.{index}")]
    return [{"role": "system", "content": parts}]


class _Conversation:
    """Converter of block messages into `chat`, the messages of a chat request; `notes` receives ignored blocks."""

    def __init__(self, messages: list[dict[str, Any]], notes: RequestNotes) -> None:
        self._notes = notes
        self.chat: list[Fields] = []
        for index, message in enumerate(messages):
            self._add(message, f"messages.{index}")

    def _add(self, message: dict[str, Any], where: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValidationError(f"{where}.role must be user, assistant or system", param=f"{where}.role")
        if content is None or isinstance(content, str):
            self.chat.append({"role": role, "content": content or ""})
        elif not isinstance(content, list):
            raise ValidationError(
                f"{where}.content must be text or a list of blocks", param=f"{where}.content"
            )
        elif role == "assistant":
            self.chat.append(self._assistant_message(content, f"{where}.content"))
        elif role == "system":
            self.chat.append({"role": role, "content": self._texts(content, f"{where}.content")})
        else:
            self.chat += self._user_messages(content, f"{where}.content")

    def _assistant_message(self, blocks: list[Any], where: str) -> Fields:
        texts, calls, thoughts = [], [], []
        for index, block in enumerate(blocks):
            place, kind = f"{where}.{index}", _kind(block)
            if kind == "tool_use":
                calls.append(_call(block, place))
            elif kind == "thinking":
                thoughts.append(_thought(block, place))
            else:
                texts += self._texts_of(block, place)
        message: Fields = {"role": "assistant", "content": texts or ""}
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        return {**message, "tool_calls": calls} if calls else message

    def _user_messages(self, blocks: list[Any], where: str) -> list[Fields]:
        """Return a user's messages: a tool result is a separate message, and the texts between two results are one."""
        messages: list[Fields] = []
        for index, block in enumerate(blocks):
            place = f"{where}.{index}"
            if _kind(block) == "tool_result":
                messages.append(self._result(block, place))
                continue
            text = self._texts_of(block, place)
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += text
            else:
                messages.append({"role": "user", "content": text})
        return messages or [{"role": "user", "content": ""}]

    def _result(self, block: Any, where: str) -> Fields:
        content, call_id = block.get("content"), block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise ValidationError(f"{where}.tool_use_id must be text", param=f"{where}.tool_use_id")
        if isinstance(content, list):
            content = self._texts(content, f"{where}.content")
        elif not isinstance(content, str | None):
            raise ValidationError(
                f"{where}.content must be text or a list of blocks", param=f"{where}.content"
            )
        return {"role": "tool", "tool_call_id": call_id, "content": content or ""}

    def _texts(self, blocks: list[Any], where: str) -> list[Fields]:
        return [
            part for index, block in enumerate(blocks) for part in self._texts_of(block, f"{where}.{index}")
        ]

    def _texts_of(self, block: Any, where: str) -> list[Fields]:
        """Return the text parts of a block; a block of Anthropic's servers has none, and is noted."""
        kind = _kind(block)
        if isinstance(kind, str) and (kind in SERVER_BLOCKS or kind.endswith(SERVER_RESULT)):
            self._notes.ignore(f"messages[].content[].{kind}")
            return []
        return _text_parts(block, where)


def _text_parts(block: Any, where: str) -> list[Fields]:
    """Return the text parts of a block for a chat message; its other fields concern caching and citations."""
    kind = _kind(block)
    if kind == "search_result":
        return _from_search_result(block, where)
    if kind == "image":
        return [_image_part(block, where)]
    return _from_document(block, where) if kind == "document" else _from_text(block, where)


def _image_part(block: Fields, where: str) -> Fields:
    """Return the part of an image, whose source is base64 or a URL."""
    place = f"{where}.source"
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise ValidationError(
                f"{place} must have the type base64, with media_type and data, or url, with url", param=place
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _from_text(block: Any, where: str) -> list[Fields]:
    kind = _kind(block)
    name = TEXT_BLOCKS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise ValidationError(f"{where} must be a block of text or an image, got {kind!r:.40}", param=where)
    if kind == "compaction" and block.get(name) is None:  # a failed compaction
        return []
    if not isinstance(block.get(name), str):
        raise ValidationError(f"{where}.{name} must be text", param=f"{where}.{name}")
    return [{"type": "text", "text": block[name]}]


def _from_search_result(block: Fields, where: str) -> list[Fields]:
    content = block.get("content")
    if not isinstance(content, list):
        raise ValidationError(f"{where}.content must be a list of text blocks", param=f"{where}.content")
    head = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
    parts = [
        part for index, inner in enumerate(content) for part in _from_text(inner, f"{where}.content.{index}")
    ]
    return [*({"type": "text", "text": text} for text in head), *parts]


def _from_document(block: Fields, where: str) -> list[Fields]:
    """Return the parts of a text document; other documents are rejected."""
    source, place = block.get("source"), f"{where}.source"
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    if not isinstance(data, str):
        raise ValidationError(f"{place} is no text: this model takes documents of text only", param=place)
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return [{"type": "text", "text": text} for text in (*head, data)]


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
    if not isinstance(block.get("name"), str):
        raise ValidationError(f"{where}.name must be text", param=f"{where}.name")
    if not isinstance(block.get("id"), str | None):
        raise ValidationError(f"{where}.id must be text", param=f"{where}.id")
    function = {"name": block["name"], "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Fields, where: str) -> Fields:
    """Return the tool in chat's form. Anthropic's own tools have a type without a schema, and are ignored by chat."""
    kind, schema = tool.get("type", "custom"), tool.get("input_schema")
    if not isinstance(kind, str) or not kind:
        raise ValidationError(f"{where}.type must be text", param=f"{where}.type")
    if kind not in OWN_TOOLS and schema is None:
        return {"type": kind}
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


def _continues_answer(message: Fields) -> bool:
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None
