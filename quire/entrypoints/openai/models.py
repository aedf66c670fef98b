"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import ModelCard, ModelList
from quire.entrypoints.openai.state import ServerState, server_of

router = APIRouter()
CREATED = int(time.time())


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
@describe(Operation(reply=ModelList))
async def list_models(request: Request) -> Response:
    """The names under which the model is served, and its adapters, whose parent it is."""
    server = server_of(request)
    return json_response(ModelList([model_card(server, name) for name in server.served_names]))


@router.get("/v1/models/{model_id:path}")
@describe(Operation(reply=ModelCard, errors=(404,)))
async def show_model(request: Request, model_id: str) -> Response:
    """One of the names."""
    server = server_of(request)
    return json_response(model_card(server, server.check_model(model_id)))


def model_card(server: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=CREATED,
        root=server.model_names[0],
        parent=server.model_names[0] if name in server.adapters else None,
        max_model_len=server.engine.config.model.max_model_len,
    )
