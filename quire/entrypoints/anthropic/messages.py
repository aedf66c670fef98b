# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens, and the model list in Anthropic's form.

Invariant: a stream's events build the same message as the request without stream. Blocks are numbered from 0 without
gaps; one is open at a time, and its deltas concatenate to the block of the whole message. The headers
`anthropic-version` and `anthropic-beta` are accepted without effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.anthropic.conversation import CHAT_NAMES, chat_fields, prompt_fields
from quire.entrypoints.anthropic.protocol import (
    WITHOUT_EFFECT,
    AnyEvent,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputDelta,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    Stopped,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from quire.entrypoints.openai.chat_prompt import chat_prompt
from quire.entrypoints.openai.errors import anthropic_body, body_of, json_response, own_id_of, status_of
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature, by_generation
from quire.entrypoints.openai.openapi.operation import Operation, describe, named_events
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.responses import ChatChunk, ToolCallMessage, Usage
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.streaming import StreamFormat
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.tool_choice import tools_in_use
from quire.entrypoints.openai.translation import (
    AnswerDelta,
    as_chat,
    as_object,
    given,
    note_ignored,
    renamed,
    respond_translated,
)
from quire.errors import NotFoundError, ValidationError
from quire.outputs import RequestStateStats

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "timeout": "max_tokens"}


def _error_event(error: BaseException, request_id: str) -> bytes:
    body = anthropic_body(body_of(error, request_id), status_of(error), request_id)
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


class MessageWriter:
    """Writer of one message."""

    stream_format = StreamFormat(
        "text/event-stream", _error_event, ping=b'event: ping\ndata: {"type": "ping"}\n\n'
    )

    def __init__(self, message_id: str, model: str) -> None:
        self._message = Message(id=message_id, model=model, content=[], usage=MessageUsage(0, 0))
        self._pieces: list[str] = []  # pieces of the open block
        self._call_index = -1

    def encode(self, event: msgspec.Struct) -> bytes:
        name = str(event.__struct_config__.tag).encode()
        return b"event: " + name + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def opening(self, usage: Usage) -> Iterator[msgspec.Struct]:
        self._message.usage = _usage(usage)
        yield MessageStart(self._message)

    def take(self, piece: AnswerDelta) -> Iterator[msgspec.Struct]:
        if piece.reasoning:
            if not isinstance(self._open_block, ThinkingBlock):
                yield from self._start(ThinkingBlock(""))
            self._pieces.append(piece.reasoning)
            yield BlockDelta(self._index, ThinkingDelta(piece.reasoning))
        if piece.content:
            if not isinstance(self._open_block, TextBlock):
                yield from self._start(TextBlock(""))
            self._pieces.append(piece.content)
            yield BlockDelta(self._index, TextDelta(piece.content))
        for call in piece.tool_calls:
            yield from self._call(call)
        if piece.finish_reason is not None:
            yield from self._stop()
            self._note_reason(piece)

    def closing(self, last: ChatChunk, stats: RequestStateStats) -> Iterator[msgspec.Struct]:
        assert isinstance(last.usage, Usage)
        message = self._message
        message.usage = _usage(last.usage)
        message.timings, message.ignored, message.adjusted = last.timings, last.ignored, last.adjusted
        stopped = Stopped(message.stop_reason, message.stop_sequence)
        yield MessageDelta(stopped, message.usage, message.timings, message.ignored, message.adjusted)
        yield MessageStop()

    def result(self) -> Message:
        return self._message

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1

    @property
    def _open_block(self) -> Block | None:
        return self._message.content[-1] if self._message.content else None

    def _call(self, call: ToolCallMessage) -> Iterator[msgspec.Struct]:
        assert isinstance(call.index, int)
        if call.index != self._call_index:
            self._call_index = call.index
            yield from self._start(ToolUseBlock(call.id, call.function.name, msgspec.Raw(b"{}")))
        self._pieces.append(call.function.arguments)
        yield BlockDelta(self._index, InputDelta(call.function.arguments))

    def _start(self, block: Block) -> Iterator[msgspec.Struct]:
        yield from self._stop()
        self._message.content.append(block)
        yield BlockStart(self._index, block)

    def _stop(self) -> Iterator[msgspec.Struct]:
        """Close the open block, which is now complete."""
        block, whole = self._open_block, "".join(self._pieces)
        if block is None:
            return
        if isinstance(block, TextBlock):
            block.text = whole
        elif isinstance(block, ThinkingBlock):
            block.thinking = whole
            yield BlockDelta(self._index, SignatureDelta())
        else:
            block.input = as_object(whole)
        self._pieces = []
        yield BlockStop(self._index)

    def _note_reason(self, piece: AnswerDelta) -> None:
        message = self._message
        message.stop_reason = STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        if message.stop_reason == "end_turn" and isinstance(piece.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", piece.stop_reason


def _usage(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
    )


DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


class AnthropicModel(msgspec.Struct, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """One page of models; the ids are those of its first and last model."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_of(name: str, created: int, max_model_len: int) -> AnthropicModel:
    """Return a model's description."""
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created_at,
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )


def limit_of(query: QueryParams) -> int:
    """Return the page size.

    Raises:
        ValidationError: it is not an integer, out of range, or given twice.
    """
    given = query.getlist("limit")
    if not given:
        return DEFAULT_LIMIT
    text = ",".join(given)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ValidationError(
            f"limit must be one integer from 1 to {MAX_LIMIT}, got {text!r:.40}", param="limit"
        )
    return limit


def page_of(models: list[AnthropicModel], query: QueryParams, limit: int) -> AnthropicModelList:
    """Return the requested page: `limit` models after `after_id`, or the last ones before `before_id`.

    Raises:
        NotFoundError: no model has such an id.
    """
    after, before = query.get("after_id"), query.get("before_id")
    ids = [model.id for model in models]
    start = 0 if after is None else _place(ids, after, "after_id") + 1
    end = len(ids) if before is None else _place(ids, before, "before_id")
    if after is None and before is not None:
        return _page(models[max(0, end - limit) : end], has_more=end > limit)
    return _page(models[start:end][:limit], has_more=end - start > limit)


def _page(models: list[AnthropicModel], *, has_more: bool) -> AnthropicModelList:
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    return AnthropicModelList(data=models, has_more=has_more, first_id=first, last_id=last)


def _place(ids: list[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise NotFoundError(f"{param} must be the id of a served model, got {wanted!r:.100}", param=param)
    return ids.index(wanted)


router = APIRouter()


@router.post("/v1/messages")
@describe(
    Operation(
        body=(MessagesRequest,),
        reply=Message,
        stream=named_events(AnyEvent),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, MessagesRequest)
    message_id = f"msg_{own_id_of(request.scope)}"
    model = server_of(request).check_model(body.model)
    writer, fields = MessageWriter(message_id, model), {**chat_fields(body), "model": model}
    idle = given(body, WITHOUT_EFFECT)
    if "user" in fields and len(body.metadata or ()) == 1:  # chat notes it unless the user is a tenant
        idle.pop("metadata")
    note_ignored(body, idle)
    return await respond_translated(request, fields, writer, message_id, CHAT_NAMES)


@router.post("/v1/messages/count_tokens")
@describe(Operation(body=(CountTokensRequest,), reply=TokenCount, errors=(404,)))
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of this request's prompt."""
    server = server_of(request)
    server.engine.check_memory()
    body = await read_request(request, CountTokensRequest)
    note_ignored(body, given(body, WITHOUT_EFFECT))
    form = await server.form_named(server.check_model(body.model))
    with renamed(CHAT_NAMES):
        chat = await as_chat(request, prompt_fields(body), CHAT_NAMES)
        tools = tools_in_use(server, form, chat)
        prompt = await chat_prompt(server, form, chat, with_tools=tools is not None)
    return json_response(TokenCount(len(prompt.token_ids)))


FEATURE = ServerFeature(families=(EndpointFamily(router, by_generation),))
