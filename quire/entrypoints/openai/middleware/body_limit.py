"""Limits the size of requests: of their heads, and of their bodies.

Invariant: of a body, bytes are counted while they are read, so a body without a declared length, or with a false one,
costs no more memory than the limit, and all bodies together no more than the process's budget.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.middleware.body_budget import held_body
from quire.errors import HeadersTooLargeError, PayloadTooLargeError

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 2**10


class HeaderLimit:
    """What the HTTP server has read anyway may be larger, if it came at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= MAX_HEADERS and num_bytes <= MAX_HEADER_BYTES:
            await self._app(scope, receive, send)
            return
        error = HeadersTooLargeError(
            f"the request has {len(headers)} headers of {num_bytes} bytes; {MAX_HEADERS} and {MAX_HEADER_BYTES} are "
            "allowed"
        )
        await response_of(error, request_id_of(scope))(scope, receive, send)


class BodyLimit:
    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await response_of(self._too_large(), request_id_of(scope))(scope, receive, send)
            return
        num_bytes, held = 0, held_body(scope)

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            held.take(len(message.get("body", b"")))
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {self._max_bytes} bytes (--max-request-bytes)")
