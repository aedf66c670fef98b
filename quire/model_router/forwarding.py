# SPDX-License-Identifier: Apache-2.0
"""Requests passed on to a model's server, and their responses as they arrive.

Invariant: a request's body is received whole, within the limits of all bodies, before its model is loaded; a response
is never buffered. A client that leaves, while it waits or while it reads, ends its request everywhere. If the model's
server dies, an unanswered request gets 503; a stream ends with an error in its own form, any other body incomplete.
"""

from __future__ import annotations

from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.entrypoints.ollama.writer import LineWriter
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    ANTHROPIC_SHAPE,
    REQUEST_ID,
    body_of,
    json_response,
    request_id_of,
    shape_of,
    shaped_error,
)
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.middleware.body_limit import held_body
from quire.errors import ConflictError, UnavailableError
from quire.model_router.access import Access
from quire.model_router.child import Child
from quire.model_router.child_http import ChildLostError, ChildRefusedError, connected
from quire.model_router.requests import Wanted, wanted_by
from quire.model_router.router import ModelRouter

HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
REPLACED = {
    *(b"host", b"content-length", b"content-encoding", b"expect"),
    REQUEST_ID.encode(),
}  # Of requests: bodies are decoded here, and the router's id names the request in both logs.
ADDED_HERE = {b"date", REQUEST_ID.encode(), ANTHROPIC_REQUEST_ID.encode()}  # Of responses.
KEY_HEADERS = {b"authorization", b"x-api-key"}
PASSIVE = ("GET", "HEAD")  # Methods that load no model and do not count as its use.
OWN_STATE = ("/sleep", "/wake_up")  # Routes of a server whose state is the router's.


class Forwarder:
    """Endpoint of every path that belongs to a model.

    Args:
        autoload: whether requests may load models.
    """

    def __init__(self, router: ModelRouter, access: Access, in_flight: InFlight, *, autoload: bool) -> None:
        self._router = router
        self._access = access
        self._in_flight = in_flight
        self._autoload = autoload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), path_of(scope)
        self._access.check_any(headers)  # before a stranger's body is read
        if path in OWN_STATE:
            raise ConflictError(
                f"{path} is the router's to call; POST /models/load and /models/unload do the same"
            )
        body = await _received(receive)
        wanted = wanted_by(self._router.models, path, QueryParams(scope["query_string"]), body)
        self._access.check_model(headers, wanted.entry)
        if wanted.unloads:
            self._router.unload(wanted.entry.name)
            line = LineWriter(wanted.named, is_chat=path == "/api/chat", with_logprobs=False).loaded("unload")
            await json_response(line)(scope, receive, send)
            return
        exchange = Exchange(scope, send, body, with_admin_key=self._access.is_admin(headers))
        is_passive = scope["method"] in PASSIVE
        answer = self._answer_now(wanted, exchange) if is_passive else self._answer(wanted, exchange)
        await self._in_flight.run(answer, receive)

    async def _answer(self, wanted: Wanted, exchange: Exchange) -> None:
        """Answer once the model is in memory; if its server ended before it received the request, by the next one."""
        autoload = wanted.autoload and self._autoload
        while True:
            using = self._router.using(wanted.entry.name, keep_alive_s=wanted.keep_alive_s, autoload=autoload)
            async with using as child:
                try:
                    await exchange.run(wanted.entry.name, child)
                    return
                except ChildRefusedError:
                    ended = child
            await ended.ended()

    async def _answer_now(self, wanted: Wanted, exchange: Exchange) -> None:
        """Answer by a model that is in memory.

        Raises:
            UnavailableError: it is not.
        """
        name = wanted.entry.name
        child = self._router.child_of(name)
        if child is None:
            raise UnavailableError(f"the model {name!r} is {self._router.state(name).status}")
        try:
            await exchange.run(name, child)
        except ChildRefusedError:
            raise lost(name) from None


class Exchange:
    """One request and its response, between a client and a model's server.

    Args:
        body: whole and decoded.
        with_admin_key: whether the request acts with the admin key of the model's server.
    """

    def __init__(self, scope: Scope, send: Send, body: bytes, *, with_admin_key: bool) -> None:
        self._scope = scope
        self._send = send
        self._body = body
        self._with_admin_key = with_admin_key
        self._media_type: bytes | None = None  # None: the response has not begun.

    async def run(self, model: str, child: Child) -> None:
        """Pass the request on, and the response back.

        Raises:
            UnavailableError: the model's server ended before it answered.
            ChildRefusedError: it ended before it received the request.
            ChildLostError: it ended within a response that cannot tell of an error.
        """
        try:
            await self._pass(child)
        except ChildRefusedError:
            raise
        except ChildLostError:
            if self._media_type is None:
                raise lost(model) from None
            if not self._is_stream:
                raise
            await self._send_body(self._error_frame(lost(model)))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, child: Child) -> None:
        async with connected(child.socket) as exchange:
            method, headers = self._scope["method"], self._request_headers(child)
            head = await exchange.send(method, target_of(self._scope), headers, self._body)
            self._body = b""
            held_body(self._scope).release()
            headers = [
                (name, value)
                for name, value in head.headers
                if name not in HOP_BY_HOP and name not in ADDED_HERE
            ]
            self._media_type = dict(headers).get(b"content-type", b"")
            start = {"type": "http.response.start", "status": head.status_code, "headers": headers}
            await self._send(start)
            async for chunk in exchange.chunks():
                await self._send_body(chunk)

    async def _send_body(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _request_headers(self, child: Child) -> list[tuple[bytes, bytes]]:
        left_out = HOP_BY_HOP | REPLACED | (KEY_HEADERS if self._with_admin_key else set())
        headers = [(name, value) for name, value in self._scope["headers"] if name not in left_out]
        headers.append((REQUEST_ID.encode(), request_id_of(self._scope).encode()))
        if self._with_admin_key:
            headers.append((b"authorization", f"Bearer {child.admin_key}".encode()))
        return headers

    @property
    def _is_stream(self) -> bool:
        kind = self._media_type or b""
        return kind.startswith((b"text/event-stream", b"application/x-ndjson"))

    def _error_frame(self, error: UnavailableError) -> bytes:
        """Return the end of a stream; it may follow half a line."""
        body = shaped_error(body_of(error, request_id_of(self._scope)), error.status, self._scope)
        assert self._media_type is not None
        if not self._media_type.startswith(b"text/event-stream"):
            return b"\n" + body + b"\n"
        event = b"event: error\n" if shape_of(path_of(self._scope)) is ANTHROPIC_SHAPE else b""
        return b"\n\n" + event + b"data: " + body + b"\n\n"


def lost(model: str) -> UnavailableError:
    """Return the error of a request whose model's server ended."""
    return UnavailableError(f"the server of the model {model!r} has ended; try again")


def path_of(scope: Scope) -> str:
    """Return the path without the prefix under which a proxy offers the server."""
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def target_of(scope: Scope) -> bytes:
    """Return a request's target as the client encoded it, without that prefix."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.removeprefix(scope.get("root_path", "").encode())
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")


async def _received(receive: Receive) -> bytes:
    """Return the whole body.

    Raises:
        ClientDisconnect: the client left before its end.
        PayloadTooLargeError, UnavailableError: it exceeds the limits (`BodyLimit`).
    """
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
