# SPDX-License-Identifier: Apache-2.0
"""The weight version in every reply of a server with an admin key, which alone can change it."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.keys import admin_key
from quire.entrypoints.openai.state import ServerState

HEADER = b"x-weight-version"
BEGAN_HEADER = b"x-weight-version-began"


class VersionHeader:
    """Adds the version of the weights at the reply's first byte, and the one at the request's if that was another."""

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._server.engine.weight_version

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = self._server.engine.weight_version
                headers = [(HEADER, now.encode())]
                headers += [(BEGAN_HEADER, began.encode())] if began != now else []
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_version)


def add_version_header(app: FastAPI, server: ServerState) -> None:
    """Add the header to an app's replies."""
    if admin_key(server.config):
        app.add_middleware(VersionHeader, server=server)
