# SPDX-License-Identifier: Apache-2.0
"""Middleware for authentication, availability, errors and request ids, HEAD, HTTP metrics and in-flight tracking.

Invariants: every path needs a key except the open ones, decided by the routed path alone; keys are compared in constant
time. Every response has `x-request-id`, and for Anthropic's clients `request-id`; no exception reaches the HTTP server.
Metrics labels come from closed sets, so clients cannot grow `/metrics`. A request that the server cancels before its
response began is answered 503.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import id_headers, request_id_of, response_of
from quire.entrypoints.openai.in_flight import ClientDisconnectedError, InFlight, shutdown_error
from quire.entrypoints.openai.keys import ClientIds, Keyring, given_id, given_key
from quire.entrypoints.openai.notes import RequestNotes
from quire.errors import AuthenticationError, UnavailableError
from quire.logging_setup import request_id as log_request_id
from quire.metrics.catalog import make_family

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping"})
ALWAYS_SERVED = OPEN_PATHS | {
    *("/", "/version", "/metrics", "/docs", "/openapi.json"),
    # A sleeping engine takes no requests, but can be woken and queried.
    *("/sleep", "/wake_up", "/is_sleeping", "/v1/requests", "/abort_requests"),
}


class ErrorBoundary:
    """Error boundary: assigns request ids, adds the headers of notes, and converts uncaught exceptions."""

    def __init__(self, app: ASGIApp, client_ids: ClientIds) -> None:
        self._app = app
        self._client_ids = client_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        own_id = state["own_id"] = secrets.token_hex(12)
        request_id = state["request_id"] = given_id(Headers(scope=scope)) or own_id
        if request_id == own_id:
            await self._answer(scope, receive, send)
        else:
            with self._client_ids.used(request_id, own_id):
                await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        request_id: str = state["request_id"]
        in_log = log_request_id.set(request_id)
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                notes: RequestNotes | None = state.get("notes")
                note_headers = notes.headers(is_error=message["status"] >= 400) if notes else ()
                headers = [*message.get("headers", ()), *id_headers(scope), *note_headers]
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except (ClientDisconnectedError, ClientDisconnect):
            logger.debug("request %s: the client went away", request_id)
        except Exception as error:  # boundary of the process: any other handling would cut the connection
            if has_begun:
                logger.error("request %s failed after its response began", request_id, exc_info=error)
            else:
                await response_of(error, request_id)(scope, receive, send_with_headers)
        finally:
            log_request_id.reset(in_log)


class HeadAsGet:
    """Runs HEAD requests as GET and drops the body (RFC 9110, 9.3.2). The HTTP server keeps the original scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send_head)
        finally:
            scope["route"] = inner.get("route")  # read by the outer HttpMetrics


class HttpMetrics:
    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = make_family("http_requests", registry)
        self._durations = make_family("http_request_duration_seconds", registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # this server supports plain HTTP only; this outermost layer decides for all
        status = "499"  # the client disconnected before a response began
        started = time.monotonic()

        async def watch_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch_status)
        finally:
            method = scope["method"] if scope["method"] in METHODS else "other"
            handler = getattr(scope.get("route"), "path", "other")
            self._requests.labels(method, handler, status).inc()
            self._durations.labels(method, handler).observe(time.monotonic() - started)


class TrackInFlight:
    """Registers POST requests as in flight until their response is complete."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._in_flight.visit() as visit:

            async def send_seen(message: Message) -> None:
                visit.has_begun = True
                await send(message)

            try:
                await self._app(scope, receive, send_seen)
            except asyncio.CancelledError:
                if not visit.is_cancelled or visit.has_begun:
                    raise
                visit.task.uncancel()
                await response_of(shutdown_error(), request_id_of(scope))(scope, receive, send)


class Auth:
    """Rejects requests without a valid key, unless there are no keys; stores the key's tenant in the request's state.

    Args:
        open_paths: paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, keys: Keyring, root_path: str = "", open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths | {root_path + path for path in open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._tenant(scope) if self._keys else None
        if self._keys and scope["path"] not in self._open_paths and tenant is None:
            error = AuthenticationError("this server needs an API key: Authorization: Bearer <key>")
            await response_of(error, request_id_of(scope))(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        """Return the tenant of the request's key; None without a valid key."""
        key = given_key(Headers(scope=scope))
        return None if key is None else self._keys.tenant_of(key)


class Availability:
    """Answers 503 with Retry-After for every path outside `ALWAYS_SERVED` while the server is unavailable.

    Args:
        also_served: further paths that are served.
        why_not: returns the reason for unavailability, None if available.
        is_draining: whether connections are closed after their response.
    """

    def __init__(
        self,
        app: ASGIApp,
        why_not: Callable[[], str | None],
        is_draining: Callable[[], bool],
        root_path: str = "",
        also_served: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._served = ALWAYS_SERVED | also_served
        self._why_not = why_not
        self._is_draining = is_draining
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        reason = self._why_not()
        if reason is None or scope["path"].removeprefix(self._root_path) in self._served:
            await self._app(scope, receive, send_closing)
        else:
            error = UnavailableError(reason, retry_after=2)
            await response_of(error, request_id_of(scope))(scope, receive, send_closing)
