"""POST /v1/messages and /v1/messages/count_tokens, and the model list in Anthropic's form.

Invariant: a stream's events build the same message as the request without stream. The headers `anthropic-version` and
`anthropic-beta` are accepted without effect.
"""

from __future__ import annotations

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
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
)
from quire.entrypoints.anthropic.writer import MessageWriter
from quire.entrypoints.openai.chat_prompt import chat_prompt
from quire.entrypoints.openai.errors import json_response, own_id_of
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature, by_generation
from quire.entrypoints.openai.openapi.operation import Operation, describe, named_events
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.tool_choice import tools_in_use
from quire.entrypoints.openai.translation import as_chat, given, note_ignored, renamed, respond_translated
from quire.errors import NotFoundError, ValidationError

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
