"""Refuses work while the server cannot do it: loading, draining, or the engine is gone."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.middleware.auth import OPEN_PATHS
from quire.errors import UnavailableError

ALWAYS_SERVED = OPEN_PATHS | {
    *("/", "/version", "/metrics", "/docs", "/openapi.json"),
    # Who sleeps takes no work, but can be woken, and asked about what it has kept.
    *("/sleep", "/wake_up", "/is_sleeping", "/v1/requests", "/abort_requests"),
}


class Availability:
    """503 with Retry-After for every path that is not in `ALWAYS_SERVED`.

    Args:
        why_not: the reason why no work can be taken, None if it can.
        is_draining: whether connections are to be closed after their answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        why_not: Callable[[], str | None],
        is_draining: Callable[[], bool],
        root_path: str = "",
    ) -> None:
        self._app = app
        self._why_not = why_not
        self._is_draining = is_draining
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        reason = self._why_not()
        if reason is None or scope["path"].removeprefix(self._root_path) in ALWAYS_SERVED:
            await self._app(scope, receive, send_closing)
        else:
            error = UnavailableError(reason, retry_after=2)
            await response_of(error, request_id_of(scope))(scope, receive, send_closing)
