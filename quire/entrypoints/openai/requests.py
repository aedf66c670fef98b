"""Requests in flight: how many, why one waits, which there are, and their end.

Invariant: a request is found under any id that its client was shown: that of the answer, or of the header
`x-request-id`. Where keys are in use, a tenant finds its own requests alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain, count
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.admin import admin_router, is_admin
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.state import ServerState, server_of
from quire.errors import NotFoundError
from quire.scheduler.explain import Explanation

router = APIRouter()
controls = admin_router()
ID_PREFIXES = (
    "", "chatcmpl-", "cmpl-", "resp_", "msg_", "ollama-", "embd-", "pool-", "classify-", "score-", "rerank-",
)  # fmt: skip
"""What the endpoint families put before the request's id to make the id of their answer."""
MAX_LISTED = 1000
ASKED_TOGETHER = 64
"""So many prompts of a request are asked for at a time; those that there are not cost next to nothing."""


class AbortRequest(RequestModel):
    """POST /abort_requests; without ids, all requests are meant."""

    request_ids: list[str] | None = None


class ShownSequence(Explanation, frozen=True, kw_only=True):
    """`text` says it all to a person."""

    text: str


class ServerLoad(msgspec.Struct):
    server_load: int


class Explained(msgspec.Struct):
    id: str
    sequences: list[ShownSequence]


class RequestList(msgspec.Struct, kw_only=True):
    """`num_requests` counts also those that are not shown."""

    object: Literal["list"] = "list"
    num_requests: int
    data: list[ShownSequence]


class Aborted(msgspec.Struct):
    num_aborted: int


@router.get("/load")
@describe(Operation(reply=ServerLoad))
async def load(request: Request) -> Response:
    """How many requests the server is working on."""
    return json_response(ServerLoad(sum(await server_of(request).everywhere("load"))))


@router.get("/v1/requests/{request_id}/explain")
@describe(Operation(reply=Explained, errors=(404,)))
async def explain(request: Request, request_id: str) -> Response:
    """Why the request waits or waited, for each of its sequences; 404 if it is unknown, another tenant's, or ended too
    long ago."""
    answers = await server_of(request).everywhere("explain", request_id)
    found = msgspec.convert([*chain.from_iterable(answers)], list[ShownSequence])
    tenant = request.scope["state"]["tenant"]
    if tenant is not None and not is_admin(request):
        found = [one for one in found if one.tenant == tenant]
    if not found:
        raise NotFoundError(f"no request {request_id!r:.100} is known to the engine", param="request_id")
    return json_response(Explained(request_id, found))


@controls.get("/v1/requests")
@describe(Operation(reply=RequestList))
async def list_requests(request: Request) -> Response:
    """The state of every sequence in flight, as far as the first thousand requests go; oldest first, by process."""
    requests = [*chain.from_iterable(await server_of(request).everywhere("list"))]
    shown = msgspec.convert([*chain.from_iterable(requests[:MAX_LISTED])], list[ShownSequence])
    return json_response(RequestList(num_requests=len(requests), data=shown))


@controls.post("/abort_requests")
@describe(Operation(body=(AbortRequest,), reply=Aborted))
async def abort_requests(request: Request) -> Response:
    """End requests, of these ids or all; their clients get an error. Unknown ids are ignored."""
    body = await read_request(request, AbortRequest)
    return json_response(Aborted(sum(await server_of(request).everywhere("abort", body.request_ids))))


async def num_in_flight(server: ServerState) -> int:
    """Requests that this process is working on."""
    return len(server.in_flight)


async def explained(server: ServerState, request_id: str) -> list[ShownSequence]:
    """All prompts of the request: the engine knows each under the answer's id and its number."""
    found: list[ShownSequence] = []
    for name in server.client_ids.names_of(request_id):
        for start in count(step=ASKED_TOGETHER):
            numbers = range(start, start + ASKED_TOGETHER)
            names = [f"{prefix}{name}-{number}" for prefix in ID_PREFIXES for number in numbers]
            news = [*chain.from_iterable(await _explained(server, names))]
            if not news:
                break
            found += news
    return found


async def listed(server: ServerState) -> list[list[ShownSequence]]:
    """The sequences of each request of this process, oldest first; only the first thousand are looked at."""
    labels = server.engine.labels()
    return await _explained(server, labels[:MAX_LISTED]) + [[] for _ in labels[MAX_LISTED:]]


async def aborted(server: ServerState, request_ids: list[str] | None) -> int:
    """End those of these requests that this process has; how many it had."""
    labels = server.engine.labels()
    if request_ids is not None:
        own = chain.from_iterable(map(server.client_ids.names_of, request_ids))
        names = {prefix + name for name in own for prefix in ID_PREFIXES}
        labels = [label for label in labels if label.rpartition("-")[0] in names]
    await server.engine.abort(labels)
    return len(labels)


async def _explained(server: ServerState, labels: Iterable[str]) -> list[list[ShownSequence]]:
    """The sequences of each request, none of one that is unknown or has ended.

    A core is asked for all at once, since it answers between two steps.
    """
    return await asyncio.gather(*(_sequences(server, label) for label in labels))


async def _sequences(server: ServerState, label: str) -> list[ShownSequence]:
    try:
        return [_shown(one) for one in await server.engine.explain(label)]
    except NotFoundError:
        return []


def _shown(explanation: Explanation) -> ShownSequence:
    return ShownSequence(**msgspec.structs.asdict(explanation), text=str(explanation))
