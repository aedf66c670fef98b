"""Probes, and what the server is.

Invariant: a probe never touches the engine core, so it answers while the core loads or computes.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import Version
from quire.entrypoints.openai.state import server_of
from quire.errors import EngineDeadError, UnavailableError

router = APIRouter()


@router.get("/health")
@router.get("/readyz")
@router.api_route("/ping", methods=["GET", "POST"])
@describe(Operation())
async def ready(request: Request) -> Response:
    """200 if a request should come here now; 503 while a core loads or does not answer, when the queue is nearly full,
    when draining and at the end."""
    server = server_of(request)
    reason = server.unavailable or server.engine.crowding()
    if reason is not None:
        raise UnavailableError(reason)
    return Response()


@router.get("/livez")
@describe(Operation())
async def live(request: Request) -> Response:
    """200 while loading, computing (however long) and draining; 503 while the engine core stands still, and at the
    end."""
    engine = server_of(request).engine
    if engine.errored:
        raise EngineDeadError("the engine has stopped")
    if engine.stalls:
        raise UnavailableError("the engine core does not answer; it is replaced if that goes on")
    return Response()


@router.get("/version")
@describe(Operation(reply=Version))
async def version() -> Response:
    """The version of quire."""
    return json_response(Version(__version__))
