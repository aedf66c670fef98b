# SPDX-License-Identifier: Apache-2.0
"""WebSocket at /v1/realtime: the checks that HTTP requests pass in middleware, then a session.

Invariant: an upgrade is accepted only for a valid key, an allowed origin, an engine that takes requests, and below the
limit of sessions; a session that is silent for `IDLE_S` seconds ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.entrypoints.openai.errors import response_of
from quire.entrypoints.openai.keys import given_key
from quire.entrypoints.openai.state import ServerState
from quire.errors import (
    AuthenticationError,
    ForbiddenError,
    NotFoundError,
    QuireError,
    UnavailableError,
    ValidationError,
)
from quire.speech.desk import SpeechDesk, desk_of
from quire.speech.realtime import Event, Session, SessionEndError
from quire.speech.vocabulary import hears

logger = logging.getLogger(__name__)

PATH = "/v1/realtime"
INSTALL = "pip install 'quire-llm[realtime]'"
MAX_SESSIONS = 64
IDLE_S = 120.0
POLICY, GOING_AWAY, FAILED = 1008, 1001, 1011


def can_upgrade() -> bool:
    """Return whether the package that speaks WebSocket is installed."""
    return importlib.util.find_spec("websockets") is not None


def add_realtime(app: FastAPI, state: ServerState) -> None:
    """Serve WebSockets if the app's model transcribes and the package is there; without it, say so over HTTP."""
    if not hears(state.engine.config):
        return
    app.add_middleware(Realtime, state=state, desk=lambda: desk_of(app))
    if can_upgrade():
        app.state.websocket_path = state.config.root_path + PATH


class Realtime:
    """ASGI middleware, outermost: serves WebSockets, and passes HTTP on but for their path.

    Args:
        desk: returns the server's desk.
    """

    def __init__(self, app: ASGIApp, state: ServerState, desk: Callable[[], SpeechDesk]) -> None:
        self._app = app
        self._state = state
        self._desk = desk
        self._num_sessions = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve(WebSocket(scope, receive, send))
        elif scope["type"] == "http" and self._is_ours(scope):
            need = "" if can_upgrade() else f", for which the server lacks a package: {INSTALL}"
            await response_of(ValidationError(f"{PATH} is a WebSocket{need}"), "realtime")(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.removeprefix(self._state.config.root_path) == PATH

    async def _serve(self, socket: WebSocket) -> None:
        session_id = f"realtime-{secrets.token_hex(12)}"
        try:
            tenant = self._admitted(socket)
        except QuireError as error:
            await socket.send_denial_response(response_of(error, session_id))
            return
        self._num_sessions += 1
        try:
            await socket.accept()
            await self._run(socket, session_id, tenant)
        except (WebSocketDisconnect, OSError):
            logger.debug("session %s: the client went away", session_id)
        finally:
            self._num_sessions -= 1

    def _admitted(self, socket: WebSocket) -> str:
        """Return the tenant of a client that may have a session.

        Raises:
            QuireError: it may not.
        """
        state, headers = self._state, Headers(scope=socket.scope)
        if not self._is_ours(socket.scope):
            raise NotFoundError(f"WebSockets are served at {PATH} only")
        key = given_key(headers)
        tenant = state.keys.tenant_of(key) if state.keys and key is not None else None
        if state.keys and tenant is None:
            raise AuthenticationError("this server needs an API key: Authorization: Bearer <key>")
        origin, allowed = headers.get("origin"), state.config.allowed_origins
        if origin is not None and origin not in allowed and "*" not in allowed:
            raise ForbiddenError(
                f"WebSockets from pages of {origin:.100} are not accepted (--allowed-origins)"
            )
        reason = state.unavailable
        if reason is not None:
            raise UnavailableError(reason, retry_after=2)
        if self._num_sessions >= MAX_SESSIONS:
            raise UnavailableError(f"there are {MAX_SESSIONS} sessions, which is the limit", retry_after=5)
        return tenant or ""

    async def _run(self, socket: WebSocket, session_id: str, tenant: str) -> None:
        async def send(event: Event) -> None:
            await socket.send_text(json.dumps(event, ensure_ascii=False))

        await send({"type": "session.created", "id": session_id, "created": int(time.time())})
        session = Session(self._desk(), session_id, send, self._state.check_model, {"tenant": tenant})
        try:
            await session.run(self._messages(socket))
        except SessionEndError as error:
            await send({"type": "error", "error": str(error), "code": "session_ended"})
            await socket.close(FAILED)
        except TimeoutError:
            why = f"the session had no message for {IDLE_S:g} seconds"
            await send({"type": "error", "error": why, "code": "idle_timeout"})
            await socket.close(GOING_AWAY)

    async def _messages(self, socket: WebSocket) -> AsyncIterator[str]:
        """Yield the client's texts. Raises TimeoutError if none comes for too long, WebSocketDisconnect at the end."""
        while True:
            async with asyncio.timeout(IDLE_S):
                message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1000))
            text = message.get("text")
            if text is None:
                raise SessionEndError("messages must be texts, not bytes")
            yield text
