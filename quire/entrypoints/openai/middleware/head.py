"""HEAD for every path that takes GET: the same answer without its body, as RFC 9110 (9.3.2) has it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Head:
    """Asks the routes for GET. Only the copy that they see is changed: the HTTP server must know that it was HEAD."""

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
            scope["route"] = inner.get("route")  # for the metrics, which look at it from outside
