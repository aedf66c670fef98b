# SPDX-License-Identifier: Apache-2.0
"""POST /start_profile and /stop_profile, with --profiler-config."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature
from quire.entrypoints.openai.keys import admin_key
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import is_admin
from quire.errors import AuthenticationError

router = APIRouter()


class ProfileState(msgspec.Struct):
    """`files`: profiles that were written, one for each engine core."""

    is_running: bool
    files: list[str]


@router.post("/start_profile")
@describe(Operation(reply=ProfileState, errors=(401,)))
async def start_profile(request: Request) -> Response:
    """Start a profile of every engine core; needs --profiler-config, and the admin key if there is one."""
    await _allowed(request).engine.start_profile()
    return json_response(ProfileState(True, []))


@router.post("/stop_profile")
@describe(Operation(reply=ProfileState, errors=(401,)))
async def stop_profile(request: Request) -> Response:
    """End the profile and write it to the operator's directory."""
    files = await _allowed(request).engine.stop_profile()
    return json_response(ProfileState(False, files))


def _allowed(request: Request) -> ServerState:
    """Return the server.

    Raises:
        AuthenticationError: it has an admin key, which the request lacks.
    """
    server = server_of(request)
    if admin_key(server.config) is not None and not is_admin(request):
        raise AuthenticationError("this route needs the admin key: Authorization: Bearer <key>")
    return server


FEATURE = ServerFeature(families=(EndpointFamily(router),))
