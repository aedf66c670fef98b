# SPDX-License-Identifier: Apache-2.0
"""GET /console/frame and GET /console/block, for the admin key: what the console shows of the engine cores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.console.frames import DEVICE, HOST, BlockRow, Frame
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.families import ServerFeature
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import NotFoundError, UnavailableError, ValidationError

controls = admin_router()

PATIENCE_S = 10.0  # A core answers between two steps.
MAX_NUMBER = 2**53
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}
FRAME_QUERY = {"after": {"type": "array", "items": NUMBER}}
BLOCK_QUERY = {"core": NUMBER, "tier": {"enum": [DEVICE, HOST]}, "id": NUMBER}


class CoreFrames(msgspec.Struct):
    """Present frame of each core."""

    cores: list[Frame]


@controls.get("/console/frame")
@describe(Operation(reply=CoreFrames, query=FRAME_QUERY))
async def show_frame(request: Request) -> Response:
    """Show requests, steps and cache blocks of every core; `after` is the last step already known, core by core."""
    after = [_number("after", text) for text in request.query_params.getlist("after")]
    found = await _ask(server_of(request), "console_frame", min(after, default=0))
    frames = msgspec.convert(found, list[Frame])
    return json_response(CoreFrames([_since(frame, after, core) for core, frame in enumerate(frames)]))


@controls.get("/console/block")
@describe(Operation(reply=BlockRow, errors=(404,), query=BLOCK_QUERY))
async def show_block(request: Request) -> Response:
    """Show one block of a core's cache, and the requests that hold it."""
    query = request.query_params
    tier = query.get("tier", DEVICE)
    if tier not in (DEVICE, HOST):
        raise ValidationError(f"tier must be {DEVICE} or {HOST}, got {tier!r:.64}", param="tier")
    core, block_id = _number("core", query.get("core", "0")), _number("id", query.get("id", "0"))
    found = await _ask(server_of(request), "console_block", tier, block_id)
    if core >= len(found) or found[core] is None:
        raise NotFoundError(f"core {core} has no block {block_id} on the {tier}", param="id")
    return json_response(msgspec.convert(found[core], BlockRow))


def _since(frame: Frame, after: Sequence[int], core: int) -> Frame:
    """Leave out the steps that the page has."""
    last = after[core] if core < len(after) else 0
    return msgspec.structs.replace(frame, steps=[step for step in frame.steps if step.step_id > last])


async def _ask(server: ServerState, method: str, *args: Any) -> list[Any]:
    """Return the answer of every core.

    Raises:
        UnavailableError: a core does not answer.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await server.engine.call_cores(method, *args)
    except TimeoutError:
        raise UnavailableError(
            "an engine core does not answer: it loads, or computes a long step", retry_after=2
        ) from None


def _number(name: str, text: str) -> int:
    """Return a number of the query.

    Raises:
        ValidationError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 16) or int(text) > MAX_NUMBER:
        raise ValidationError(
            f"{name} must be a number of at most {MAX_NUMBER}, got {text!r:.64}", param=name
        )
    return int(text)


FEATURE = ServerFeature(controls=(controls,), is_enabled=lambda config: config.console)
