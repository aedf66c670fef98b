"""Counts and times HTTP requests.

Invariant: labels come from closed sets (known methods, registered route patterns, status codes that we send),
so no client can make `/metrics` grow.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.metrics.families import make_family

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetrics:
    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = make_family("http_requests", registry)
        self._durations = make_family("http_request_duration_seconds", registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the outermost layer decides for all: this server speaks plain HTTP
        status = "499"  # the client went away before an answer began
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
