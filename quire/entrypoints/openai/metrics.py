"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.state import server_of
from quire.metrics.families import VllmNames

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything measured so far, as Prometheus reads it."""
    server = server_of(request)
    shown = VllmNames(server.registry) if server.config.metrics_compat == "vllm" else server.registry
    return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)
