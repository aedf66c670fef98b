# SPDX-License-Identifier: Apache-2.0
"""GET /v1/models and /v1/models/{id}, in OpenAI's form, or in Anthropic's for its clients."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.anthropic.messages import (
    QUERY,
    AnthropicModel,
    AnthropicModelList,
    limit_of,
    model_of,
    page_of,
)
from quire.entrypoints.openai.errors import ANTHROPIC_VERSION, json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import Modalities, ModelCard, ModelList
from quire.entrypoints.openai.state import ServerState, server_of

router = APIRouter()
HEADERS = {ANTHROPIC_VERSION: {"type": "string"}}
CREATED = int(time.time())


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
@describe(
    Operation(reply=ModelList, anthropic=AnthropicModelList, errors=(400, 404), headers=HEADERS, query=QUERY)
)
async def list_models(request: Request) -> Response:
    """List the names under which the model is served, and its adapters, whose parent it is.

    Anthropic's clients get pages.
    """
    server = server_of(request)
    limit = limit_of(request.query_params)
    if ANTHROPIC_VERSION in request.headers:
        models = [_anthropic_model(server, name) for name in server.served_names]
        return json_response(page_of(models, request.query_params, limit))
    return json_response(ModelList([model_card(server, name) for name in server.served_names]))


@router.get("/v1/models/{model_id:path}")
@describe(Operation(reply=ModelCard, anthropic=AnthropicModel, errors=(404,), headers=HEADERS))
async def show_model(request: Request, model_id: str) -> Response:
    """Show one of the names."""
    server = server_of(request)
    name = server.check_model(model_id)
    is_anthropic = ANTHROPIC_VERSION in request.headers
    return json_response((_anthropic_model if is_anthropic else model_card)(server, name))


def _anthropic_model(server: ServerState, name: str) -> AnthropicModel:
    return model_of(name, CREATED, server.engine.config.model.max_model_len)


def model_card(server: ServerState, name: str) -> ModelCard:
    return ModelCard(
        architecture=Modalities(server.media.input_modalities, ["text"]),
        id=name,
        created=CREATED,
        root=server.model_names[0],
        parent=server.model_names[0] if name in server.adapters else None,
        max_model_len=server.engine.config.model.max_model_len,
    )
