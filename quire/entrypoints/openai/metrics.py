"""GET /metrics"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.exposition import Merged, families_of
from quire.entrypoints.openai.state import ServerState, server_of
from quire.metrics.families import VllmNames

router = APIRouter()
QUESTION = "metrics"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything measured so far, as Prometheus reads it; in all processes of the server together."""
    server = server_of(request)
    alone = server.siblings is None
    source = server.registry if alone else Merged(await server.everywhere(QUESTION))
    shown = VllmNames(source) if server.config.metrics_compat == "vllm" else source
    return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


async def measured(server: ServerState) -> list[Any]:
    """What this process has measured."""
    return families_of(server.registry)
