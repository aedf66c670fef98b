# SPDX-License-Identifier: Apache-2.0
"""Routes for requests in flight and for administration of the engine.

Invariant: a request is found under any id shown to its client: the answer's, or the header `x-request-id`. With keys in
use, a tenant finds its own requests only. GET /v1/integrity, POST /reset_prefix_cache and the listing and aborting of
requests need the admin key.
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

from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.protocol.responses import EncoderCacheReset, Integrity, PrefixCacheReset
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router, is_admin
from quire.errors import ConflictError, NotFoundError, ValidationError
from quire.scheduler.explain import Explanation
from quire.scheduler.output import SchedulerStats

controls = admin_router()

ID_PREFIXES = (
    "", "chatcmpl-", "cmpl-", "resp_", "msg_", "ollama-", "embd-", "pool-", "classify-", "score-", "rerank-",
)  # fmt: skip  # Prefixes of answer ids, by endpoint family.
MAX_LISTED = 1000
ASKED_TOGETHER = 64  # Prompts of a request to query at a time; unknown ones cost almost nothing.


@controls.get("/v1/integrity")
@describe(Operation(reply=Integrity))
async def integrity(request: Request) -> Response:
    """Check the invariants of every engine core, and count the resources in use; all counts are 0 at rest.

    500 if an invariant of the scheduler or of the KV cache does not hold: a bug, whose details are in the log.
    """
    server = server_of(request)
    cores = await server.engine.check_integrity()
    counts = Integrity(
        num_requests=len(server.engine.labels()),
        num_sequences=server.engine.num_unfinished_requests(),
        num_generations=len(server.in_flight),
        num_tasks=len(asyncio.all_tasks()),
        cores=[_counts(core) for core in cores],
    )
    return json_response(counts)


def _counts(stats: SchedulerStats) -> dict[str, int | float]:
    """Return the scheduler's numbers without draft statistics, which are metrics."""
    every = msgspec.structs.asdict(stats)
    return {name: value for name, value in every.items() if isinstance(value, int | float)}


@controls.post("/reset_prefix_cache")
@describe(Operation(reply=PrefixCacheReset, errors=(409,)))
async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached prefixes. 409, and nothing dropped, while a request is running."""
    for name in request.query_params:
        raise ValidationError("this route has no options", param=name[:64])
    if not await server_of(request).engine.reset_prefix_cache():
        raise ConflictError("the prefix cache was not reset: requests are running")
    return json_response(PrefixCacheReset())


@controls.post("/reset_encoder_cache")
@describe(Operation(reply=EncoderCacheReset))
async def reset_encoder_cache(request: Request) -> Response:
    """Drop the embeddings of images and other media that no request uses."""
    for name in request.query_params:
        raise ValidationError("this route has no options", param=name[:64])
    return json_response(EncoderCacheReset(await server_of(request).engine.reset_encoder_cache()))


router = APIRouter()


class AbortRequest(RequestModel):
    """POST /abort_requests; without ids all requests are aborted."""

    request_ids: list[str] | None = None


class ShownSequence(Explanation, frozen=True, kw_only=True):
    """State of a sequence; `text` is a readable summary."""

    text: str


class ServerLoad(msgspec.Struct):
    server_load: int


class Explained(msgspec.Struct):
    id: str
    sequences: list[ShownSequence]


class RequestList(msgspec.Struct, kw_only=True):
    """List of requests; `num_requests` also counts those that are not shown."""

    object: Literal["list"] = "list"
    num_requests: int
    data: list[ShownSequence]


class Aborted(msgspec.Struct):
    num_aborted: int


@router.get("/load")
@describe(Operation(reply=ServerLoad))
async def load(request: Request) -> Response:
    """Return the number of requests in flight."""
    return json_response(ServerLoad(sum(await server_of(request).ask_all("load"))))


@router.get("/v1/requests/{request_id}/explain")
@describe(Operation(reply=Explained, errors=(404,)))
async def explain(request: Request, request_id: str) -> Response:
    """Explain why the request waits or waited, for each of its sequences; 404 if it is unknown, another tenant's, or
    ended too long ago.
    """
    answers = await server_of(request).ask_all("explain", request_id)
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
    """List every sequence in flight of the first thousand requests; oldest first, by process."""
    requests = [*chain.from_iterable(await server_of(request).ask_all("list"))]
    shown = msgspec.convert([*chain.from_iterable(requests[:MAX_LISTED])], list[ShownSequence])
    return json_response(RequestList(num_requests=len(requests), data=shown))


@controls.post("/abort_requests")
@describe(Operation(body=(AbortRequest,), reply=Aborted))
async def abort_requests(request: Request) -> Response:
    """Abort requests, of these ids or all; their clients get an error. Unknown ids are ignored."""
    body = await read_request(request, AbortRequest)
    return json_response(Aborted(sum(await server_of(request).ask_all("abort", body.request_ids))))


async def num_in_flight(server: ServerState) -> int:
    """Return the number of this process's requests in flight."""
    return len(server.in_flight)


async def explained(server: ServerState, request_id: str) -> list[ShownSequence]:
    """Return the sequences of all prompts of a request; a prompt's label is the answer's id and its number."""
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
    """Return the sequences of each request of this process, oldest first; only the first thousand are queried."""
    labels = server.engine.labels()
    return await _explained(server, labels[:MAX_LISTED]) + [[] for _ in labels[MAX_LISTED:]]


async def aborted(server: ServerState, request_ids: list[str] | None) -> int:
    """Abort those of the requests that this process serves; return their number."""
    labels = server.engine.labels()
    if request_ids is not None:
        own = chain.from_iterable(map(server.client_ids.names_of, request_ids))
        names = {prefix + name for name in own for prefix in ID_PREFIXES}
        labels = [label for label in labels if label.rpartition("-")[0] in names]
    await server.engine.abort(labels)
    return len(labels)


async def _explained(server: ServerState, labels: Iterable[str]) -> list[list[ShownSequence]]:
    """Return the sequences of each request, none for an unknown or ended one.

    All are queried at once, since a core answers between two steps.
    """
    return await asyncio.gather(*(_sequences(server, label) for label in labels))


async def _sequences(server: ServerState, label: str) -> list[ShownSequence]:
    try:
        return [_shown(one) for one in await server.engine.explain(label)]
    except NotFoundError:
        return []


def _shown(explanation: Explanation) -> ShownSequence:
    return ShownSequence(**msgspec.structs.asdict(explanation), text=str(explanation))
