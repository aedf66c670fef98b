# SPDX-License-Identifier: Apache-2.0
"""POST /start_profile and /stop_profile, for the admin key, with --profiler-config."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.families import ServerFeature
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import admin_router

controls = admin_router()


class ProfileState(msgspec.Struct):
    """`files`: profiles that were written, one for each engine core."""

    is_running: bool
    files: list[str]


@controls.post("/start_profile")
@describe(Operation(reply=ProfileState))
async def start_profile(request: Request) -> Response:
    """Start a profile of every engine core; needs --profiler-config."""
    await server_of(request).engine.start_profile()
    return json_response(ProfileState(True, []))


@controls.post("/stop_profile")
@describe(Operation(reply=ProfileState))
async def stop_profile(request: Request) -> Response:
    """End the profile and write it to the operator's directory."""
    files = await server_of(request).engine.stop_profile()
    return json_response(ProfileState(False, files))


FEATURE = ServerFeature(controls=(controls,))
