# SPDX-License-Identifier: Apache-2.0
"""POST /api/chat and /api/generate

Invariant: a stream's lines build the same reply as the request without stream. A request without messages or prompt
asks Ollama to load the model, which is always loaded here.
"""

from __future__ import annotations

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.ollama import models, pull
from quire.entrypoints.ollama.conversation import chat_names, chat_turn, generate_turn, text_of, unloads
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
from quire.entrypoints.openai.translation import (
    check_translated,
    given,
    note_ignored,
    respond_translated,
)

router = APIRouter()
# Placeholder conversation for checking the other fields of a request without messages.
NOTHING_TO_SAY = [{"role": "user", "content": ""}]


@router.post("/api/chat")
@describe(
    Operation(
        body=(ChatRequest,),
        reply=Line,
        stream=json_lines(Line),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatRequest)
    return await _respond(request, body, chat_turn(body), is_chat=True)


@router.post("/api/generate")
@describe(
    Operation(
        body=(GenerateRequest,),
        reply=Line,
        stream=json_lines(Line),
        errors=(404, 504),
        headers=READ_HEADERS,
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
