"""GET /v1/integrity, for the admin key: whether the books balance, and what is in use right now."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.admin import admin_router
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import Integrity
from quire.entrypoints.openai.state import server_of
from quire.scheduler.output import SchedulerStats

controls = admin_router()


@controls.get("/v1/integrity")
@describe(Operation(reply=Integrity))
async def integrity(request: Request) -> Response:
    """Check the bookkeeping of every engine core, and count what the server holds; at rest the counts are 0.

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
    """What the scheduler holds; what became of drafts is a metric."""
    every = msgspec.structs.asdict(stats)
    return {name: value for name, value in every.items() if isinstance(value, int | float)}
