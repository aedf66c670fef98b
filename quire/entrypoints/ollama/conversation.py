# SPDX-License-Identifier: Apache-2.0
"""Ollama's requests -> fields of a chat request.

Invariant: every text of the request is kept, in order. Images of a message come before its text, as in Ollama.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.ollama import options
from quire.entrypoints.ollama.protocol import ChatRequest, GenerateRequest, TurnRequest
from quire.entrypoints.openai.chat_prompt import RawTextPrompt
from quire.errors import ValidationError

CHAT_NAMES = {
    **options.CHAT_NAMES,
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}  # Chat's field names -> Ollama's.
NOT_SUPPORTED = ("template", "context")
Fields = dict[str, Any]


def chat_turn(request: ChatRequest) -> Fields:
    """Return the chat request of /api/chat.

    Raises:
        ValidationError: a message is malformed, or an option is not supported.
    """
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(request.messages)]
    fields: Fields = {"messages": messages, **_shared(request)}
    if not request.tools:
        return fields
    return {**fields, "tools": [_typed(tool) for tool in request.tools]}


def chat_names(request: TurnRequest) -> dict[str, str]:
    """Return chat's field names -> those of this request."""
    if not isinstance(request, ChatRequest):
        return CHAT_NAMES | {"messages[].role": "system"}
    has_tool_name = any(message.get("tool_name") is not None for message in request.messages)
    return CHAT_NAMES | {"messages[].name": "messages[].tool_name"} if has_tool_name else CHAT_NAMES


def generate_turn(request: GenerateRequest) -> Fields:
    """Return the chat request of /api/generate, with at most one user message. Raises as `chat_turn` does."""
    for name in NOT_SUPPORTED:
        if getattr(request, name):
            raise ValidationError(f"{name} is not supported", param=name)
    if request.suffix and request.system:
        raise ValidationError("system is for a conversation, and suffix for a text", param="system")
    system = [{"role": "system", "content": request.system}] if request.system else []
    content = _with_images(request.prompt, request.images, "images")
    messages = [*system, {"role": "user", "content": content}] if content else []
    return {"messages": messages, **_shared(request)}


def text_of(request: GenerateRequest, *, has_chat: bool) -> RawTextPrompt | None:
    """Return raw text to continue: if requested, or if the model has no chat template."""
    if not (request.raw or request.suffix or not has_chat):
        return None
    if request.images:
        raise ValidationError(
            "images are for a conversation: leave out raw and suffix, and use a model with a chat template",
            param="images",
        )
    before = request.system if request.system and not request.raw else ""
    return RawTextPrompt(f"{before}\n\n{request.prompt}" if before else request.prompt, request.suffix or "")


def unloads(request: TurnRequest) -> bool:
    """Return whether a request without a prompt asks to unload the model, which has no effect here."""
    return str(request.keep_alive).strip() in ("0", "0.0", "0s", "0m", "0h", "0ms")


def _shared(request: TurnRequest) -> Fields:
    fields: Fields = {"stream": request.stream, **options.sampling_fields(request.options or {})}
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": 0}
    if request.top_logprobs is not None:
        fields["top_logprobs"] = request.top_logprobs
    if request.think is not None:
        fields["enable_thinking" if isinstance(request.think, bool) else "reasoning_effort"] = request.think
    if request.format:
        fields["response_format"] = _response_format(request.format)
    return fields


def _response_format(form: str | Fields) -> Fields:
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    raise ValidationError("format must be json or a JSON schema", param="format")


def _typed(tool: Fields) -> Fields:
    """Return the tool with its type, which Ollama's clients may omit."""
    return {**tool, "type": "function"} if tool.get("type") in (None, "") else tool


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValidationError(f"{where} must be text", param=where)
    return value


def _with_images(text: Any, images: Any, where: str) -> Any:
    """Return a content with images, which are base64 without a URL's beginning."""
    if images is None or images == []:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValidationError(f"{where} must be a list of images in base64", param=where)
    parts: list[Fields] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _message(message: Fields, where: str) -> Fields:
    """Return a chat message; Ollama's calls have no type, and a tool's result names the tool."""
    kept = {
        name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name) is not None
    }
    kept["content"] = _with_images(kept.get("content", ""), message.get("images"), f"{where}.images")
    if message.get("thinking"):
        if not isinstance(message["thinking"], str):
            raise ValidationError(f"{where}.thinking must be text", param=f"{where}.thinking")
        kept["reasoning"] = message["thinking"]
    for name in ("name", "tool_name"):
        if message.get(name) is not None:
            kept["name"] = _text(message[name], f"{where}.{name}")
    calls = message.get("tool_calls")
    if calls is None:
        return kept
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValidationError(f"{where}.tool_calls must be a list of calls", param=f"{where}.tool_calls")
    return {**kept, "tool_calls": [{**call, "type": "function"} for call in calls]}
