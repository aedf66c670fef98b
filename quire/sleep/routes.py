# SPDX-License-Identifier: Apache-2.0
"""POST /sleep, POST /wake_up and GET /is_sleeping, for the admin key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.sleep_state import LEVELS, MODES, TAGS
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.families import ServerFeature
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import SleepState
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import UnavailableError, ValidationError

controls = admin_router()

SLEEP_QUERY: dict[str, dict[str, Any]] = {"level": {"enum": [*LEVELS]}, "mode": {"enum": [*MODES]}}
WAKE_QUERY = {"tags": {"type": "array", "items": {"enum": [*TAGS]}}}


@controls.post("/sleep")
@describe(Operation(reply=SleepState, errors=(409,), query=SLEEP_QUERY))
async def sleep(request: Request) -> Response:
    """Put the engine to sleep and release memory; the answer comes when it is done."""
    options = _options(request, "level", "mode")
    level, mode = _level(options.get("level", ["1"])), options.get("mode", ["abort"])[-1]
    await server_of(request).run_command("sleep", level, mode)
    return _state(request)


@controls.post("/wake_up")
@describe(Operation(reply=SleepState, errors=(409,), query=WAKE_QUERY))
async def wake_up(request: Request) -> Response:
    """Wake the engine, or the parts that `tags` names."""
    await server_of(request).run_command("wake_up", _options(request, "tags").get("tags"))
    return _state(request)


@controls.get("/is_sleeping")
@describe(Operation(reply=SleepState))
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps, and which parts."""
    _options(request)
    return _state(request)


async def fall_asleep(server: ServerState, level: int, mode: str) -> None:
    """Put the engine to sleep for all processes; runs in the supervisor process."""
    if server.draining:
        raise UnavailableError("the server is shutting down")
    await server.engine.sleep(level, mode)


async def wake(server: ServerState, tags: list[str] | None) -> None:
    """Wake the engine for all processes; runs in the supervisor process."""
    await server.engine.wake_up(tags)


async def num_unfinished(server: ServerState) -> int:
    """Return this process's sequences in flight."""
    return server.engine.num_unfinished_requests()


def _state(request: Request) -> Response:
    engine = server_of(request).engine
    return json_response(SleepState(engine.is_sleeping, engine.asleep))


def _options(request: Request, *names: str) -> dict[str, list[str]]:
    """Return the query's parameters; unknown ones are rejected."""
    for name in request.query_params:
        if name not in names:
            known = f"; it has {', '.join(names)}" if names else ""
            raise ValidationError(f"this route has no option {name!r:.64}{known}", param=name[:64])
    return {name: request.query_params.getlist(name) for name in request.query_params}


def _level(values: list[str]) -> int:
    """Return the level as an integer; raise ValidationError if it is not a number."""
    text = values[-1]
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        raise ValidationError(f"level must be a number, got {text!r:.100}", param="level")
    return int(text)


FEATURE = ServerFeature(
    controls=(controls,),
    queries={"unfinished": num_unfinished},
    commands={"sleep": fall_asleep, "wake_up": wake},
)
