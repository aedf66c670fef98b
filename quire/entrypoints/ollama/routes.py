"""POST /api/chat and /api/generate

Invariant: the lines of a stream make the reply that the same request gets without stream. A request without messages or
prompt asks Ollama to load the model, which is loaded here.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.ollama.conversation import CHAT_NAMES, chat_turn, generate_turn, ignored_options
from quire.entrypoints.ollama.models import served_name
from quire.entrypoints.ollama.protocol import WITHOUT_EFFECT, ChatRequest, GenerateRequest, TurnRequest
from quire.entrypoints.ollama.writer import LineWriter
from quire.entrypoints.openai.errors import request_id_of
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi import body_schema
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.translation import given, note_ignored, respond_translated

router = APIRouter()


@router.post("/api/chat", openapi_extra=body_schema(ChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatRequest)
    writer = _writer(request, body, is_chat=True)
    if not body.messages:
        return json_response(writer.loaded("load"))
    return await _respond(request, body, chat_turn(body), writer)


@router.post("/api/generate", openapi_extra=body_schema(GenerateRequest))
async def generate(request: Request) -> Response:
    """Answer a prompt."""
    body = await read_request(request, GenerateRequest)
    writer = _writer(request, body, is_chat=False)
    fields = generate_turn(body)
    if not body.prompt:
        return json_response(writer.loaded("load"))
    return await _respond(request, body, fields, writer)


def _writer(request: Request, body: TurnRequest, *, is_chat: bool) -> LineWriter:
    served_name(server_of(request), body.model)
    return LineWriter(body.model, is_chat=is_chat, with_logprobs=body.logprobs)


async def _respond(
    request: Request, body: TurnRequest, fields: dict[str, object], writer: LineWriter
) -> Response:
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *ignored_options(body)])
    answer_id = f"ollama-{request_id_of(request.scope)}"
    return await respond_translated(request, fields, writer, answer_id, CHAT_NAMES)
