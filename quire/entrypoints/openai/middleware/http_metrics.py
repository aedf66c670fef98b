"""Counts HTTP requests.

Invariant: labels come from closed sets (known methods, registered route patterns, status codes that we send),
so no client can make `/metrics` grow.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetrics:
    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "quire:http_requests", "HTTP requests.", ("method", "handler", "status"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the outermost layer decides for all: this server speaks plain HTTP
        status = "499"  # the client went away before an answer began

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
