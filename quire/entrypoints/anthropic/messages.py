"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients know them.

Invariant: the events of a stream make the message that the same request gets without stream. The headers
`anthropic-version` and `anthropic-beta` are accepted, and change nothing.
"""

from __future__ import annotations

from fastapi import APIRouter
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
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.openapi.streams import named_events
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.tool_choice import tools_in_use
from quire.entrypoints.openai.translation import as_chat, given, note_ignored, renamed, respond_translated

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
    """How many tokens the prompt of this request would have."""
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
