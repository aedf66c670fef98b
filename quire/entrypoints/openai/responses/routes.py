"""POST /v1/responses

Invariant: a stream's events build the same response as the request without stream. No response is stored.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature, by_generation
from quire.entrypoints.openai.openapi.operation import Operation, describe, named_events
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.responses.conversation import CHAT_NAMES, chat_fields, idle_includes
from quire.entrypoints.openai.responses.protocol import (
    WITHOUT_EFFECT,
    AnyEvent,
    ResponseObject,
    ResponsesRequest,
)
from quire.entrypoints.openai.responses.tools import ResponseTools
from quire.entrypoints.openai.responses.writer import ResponseWriter
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.translation import given, note_ignored, respond_translated

router = APIRouter()


@router.post("/v1/responses")
@describe(
    Operation(
        body=(ResponsesRequest,),
        reply=ResponseObject,
        stream=named_events(AnyEvent),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def create_response(request: Request) -> Response:
    """Answer an input."""
    body = await read_request(request, ResponsesRequest)
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *idle_includes(body)])
    response_id = f"resp_{own_id_of(request.scope)}"
    model = server_of(request).check_model(body.model)
    tools = ResponseTools(body.tools or [], body.notes)
    writer = ResponseWriter(response_id, model, body, tools)
    fields, names = {**chat_fields(body, tools), "model": model}, {**CHAT_NAMES, **tools.chat_names}
    return await respond_translated(request, fields, writer, response_id, names)


FEATURE = ServerFeature(families=(EndpointFamily(router, by_generation),))
