"""Requests in flight: how many, why one waits, which there are, and their end.

Invariant: a request is found under any id that its client was shown: that of the answer, or of the header
`x-request-id`.
"""

from __future__ import annotations

import contextlib
from itertools import chain, count
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from quire.entrypoints.openai.admin import admin_router
from quire.entrypoints.openai.openapi import body_schema
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.state import ServerState, server_of
from quire.errors import NotFoundError
from quire.scheduler.explain import Explanation

router = APIRouter()
controls = admin_router()
ID_PREFIXES = ("", "chatcmpl-", "cmpl-", "resp_", "msg_", "ollama-")
"""What the endpoint families put before the request's id to make the id of their answer."""
MAX_LISTED = 1000


class AbortRequest(RequestModel):
    """POST /abort_requests; without ids, all requests are meant."""

    request_ids: list[str] | None = None


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """How many requests the server is working on."""
    return JSONResponse({"server_load": sum(await server_of(request).everywhere("load"))})


@router.get("/v1/requests/{request_id}/explain")
async def explain(request: Request, request_id: str) -> JSONResponse:
    """Why the request waits or waited, for each of its sequences; 404 if it is unknown or ended too long ago."""
    found = [*chain.from_iterable(await server_of(request).everywhere("explain", request_id))]
    if not found:
        raise NotFoundError(f"no request {request_id!r:.100} is known to the engine", param="request_id")
    return JSONResponse({"id": request_id, "sequences": found})


@controls.get("/v1/requests")
async def list_requests(request: Request) -> JSONResponse:
    """The state of every sequence in flight, as far as the first thousand requests go; oldest first, by process."""
    requests = [*chain.from_iterable(await server_of(request).everywhere("list"))]
    shown = [*chain.from_iterable(requests[:MAX_LISTED])]
    return JSONResponse({"object": "list", "num_requests": len(requests), "data": shown})


@controls.post("/abort_requests", openapi_extra=body_schema(AbortRequest))
async def abort_requests(request: Request) -> JSONResponse:
    """End requests, of these ids or all; their clients get an error. Unknown ids are ignored."""
    body = await read_request(request, AbortRequest)
    return JSONResponse({"num_aborted": sum(await server_of(request).everywhere("abort", body.request_ids))})


async def num_in_flight(server: ServerState) -> int:
    """Requests that this process is working on."""
    return len(server.in_flight)


async def explained(server: ServerState, request_id: str) -> list[dict[str, Any]]:
    """All prompts of the request: the engine knows each under the answer's id and its number."""
    found: list[dict[str, Any]] = []
    for prefix in ID_PREFIXES:
        with contextlib.suppress(NotFoundError):
            for index in count():
                found += [_shown(one) for one in await server.engine.explain(f"{prefix}{request_id}-{index}")]
    return found


async def listed(server: ServerState) -> list[list[dict[str, Any]]]:
    """The sequences of each request of this process, oldest first; only the first thousand are looked at."""
    requests: list[list[dict[str, Any]]] = []
    labels = server.engine.labels()
    for label in labels[:MAX_LISTED]:
        sequences = []
        with contextlib.suppress(NotFoundError):  # it ended while others were asked for
            sequences = [_shown(one) for one in await server.engine.explain(label)]
        requests.append(sequences)
    return requests + [[] for _ in labels[MAX_LISTED:]]


async def aborted(server: ServerState, request_ids: list[str] | None) -> int:
    """End those of these requests that this process has; how many it had."""
    labels = server.engine.labels()
    if request_ids is not None:
        names = {prefix + name for prefix in ID_PREFIXES for name in request_ids}
        labels = [label for label in labels if label.rpartition("-")[0] in names]
    await server.engine.abort(labels)
    return len(labels)


def _shown(explanation: Explanation) -> dict[str, Any]:
    return {**msgspec.structs.asdict(explanation), "shares": _shares(explanation), "text": str(explanation)}


def _shares(explanation: Explanation) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(share) for share in explanation.shares]
