# SPDX-License-Identifier: Apache-2.0
"""POST /api/chat and /api/generate: requests to fields of a chat request, and the replies.

Invariant: a stream's lines build the same reply as the request without stream. Every text of a request is kept, in
order; images of a message come before its text, as in Ollama. A request without messages or prompt asks Ollama to load
the model, which is always loaded here.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.ollama import models, options, pull
from quire.entrypoints.ollama.options import ignored_options
from quire.entrypoints.ollama.protocol import WITHOUT_EFFECT, ChatRequest, GenerateRequest, Line, TurnRequest
from quire.entrypoints.ollama.writer import LineWriter
from quire.entrypoints.openai.chat_prompt import RawTextPrompt
from quire.entrypoints.openai.errors import json_response, own_id_of
from quire.entrypoints.openai.families import (
    EndpointFamily,
    ServerFeature,
    by_embedding,
    by_generation,
    families_with,
)
from quire.entrypoints.openai.openapi.operation import Operation, describe, json_lines
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.translation import check_translated, given, note_ignored, respond_translated
from quire.errors import ValidationError

CHAT_NAMES = {
    **options.CHAT_NAMES,
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}  # Chat's field names -> Ollama's.
NOT_SUPPORTED = {
    "template": "the server's operator gives --chat-template; raw sends a prompt without one",
    "context": "send the conversation as messages to /api/chat",
}
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
    for name, instead in NOT_SUPPORTED.items():
        if getattr(request, name):
            raise ValidationError(f"{name} is not supported: {instead}", param=name)
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


router = APIRouter()
# Placeholder conversation for checking the other fields of a request without messages.
NOTHING_TO_SAY = [{"role": "user", "content": ""}]


@router.post("/api/chat")
@describe(
    Operation(
        body=(ChatRequest,), reply=Line, stream=json_lines(Line), errors=(404, 504), headers=READ_HEADERS
    )
)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatRequest)
    return await _respond(request, body, chat_turn(body), is_chat=True)


@router.post("/api/generate")
@describe(
    Operation(
        body=(GenerateRequest,), reply=Line, stream=json_lines(Line), errors=(404, 504), headers=READ_HEADERS
    )
)
async def generate(request: Request) -> Response:
    """Answer a prompt."""
    body = await read_request(request, GenerateRequest)
    text = text_of(body, has_chat=server_of(request).form.has_chat)
    return await _respond(request, body, generate_turn(body), is_chat=False, text=text)


async def _respond(
    request: Request,
    body: TurnRequest,
    fields: dict[str, object],
    *,
    is_chat: bool,
    text: RawTextPrompt | None = None,
) -> Response:
    fields["model"] = models.served_name(server_of(request), body.model)
    names = chat_names(body)
    writer = LineWriter(body.model, is_chat=is_chat, with_logprobs=body.logprobs)
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *ignored_options(body.options)])
    if not fields["messages"]:
        await check_translated(request, {**fields, "messages": NOTHING_TO_SAY}, names, text)
        loaded = writer.loaded("unload" if unloads(body) else "load")
        loaded.ignored = body.notes.ignored or UNSET
        return json_response(loaded)
    answer_id = f"ollama-{own_id_of(request.scope)}"
    return await respond_translated(request, fields, writer, answer_id, names, text)


FEATURE = ServerFeature(
    families=(
        *families_with("pooling", "quire.entrypoints.ollama.embeddings:router", by_embedding),
        EndpointFamily(router, by_generation),
        EndpointFamily(models.router),
        EndpointFamily(pull.router),
    ),
    install=pull.install,
)
