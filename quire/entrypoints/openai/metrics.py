"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.state import server_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything measured so far, as Prometheus reads it."""
    return Response(generate_latest(server_of(request).registry), media_type=CONTENT_TYPE_LATEST)
