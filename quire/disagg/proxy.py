# SPDX-License-Identifier: Apache-2.0
"""Proxy that has one engine compute a prompt, and another one generate from its blocks, by vLLM's protocol.

Each request for text goes to a prefill engine with `max_tokens` 1 and `do_remote_decode`; the `kv_transfer_params` of
its reply go with the request to a decode engine. Without a prefill engine that takes it, or with params that the decode
engine refuses, the decode engine does it all, so that its refusal is the only one that a client ever gets.

Invariant: a client gets one whole reply, or one error. An engine that is lost before the client has received a byte is
replaced by the next one; a stream that breaks later ends in an error event and `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Container, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from quire.disagg.engines import (
    SHOWN_BYTES,
    EngineReply,
    LostEngineError,
    ProxiedEngine,
    Timeouts,
    in_order,
    json_object,
)
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

TEXT_PATHS = ("/v1/chat/completions", "/v1/completions")
PASSED_PATHS = ("/v1/models", "/tokenize", "/detokenize", "/version")
PASSED_HEADERS = (
    "authorization", "x-api-key", "x-request-id", "traceparent", "tracestate", "accept", "user-agent",
)  # fmt: skip
RETURNED_HEADERS = ("content-type", "x-request-id", "retry-after", "www-authenticate", "cache-control")
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
PREFILL_TOKENS = {"max_tokens": 1, "max_completion_tokens": 1}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n", "best_of")
MAX_BODY_BYTES = 2**26
RETRIED = (429, 502, 503, 504)
"""Statuses of an engine that is asked in vain, and others need not be."""
REFUSED = (400, 422)
"""Statuses of a request that is refused for what is in it, such as blocks of an engine that is not among the peers."""


class ProxyError(Exception):
    """Error reply of the proxy itself."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "service_unavailable"
        detail = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return json.dumps({"error": detail}).encode()


class DisaggProxy:
    """ASGI application.

    Args:
        prefill, decode: the engines; at least one of each.
        max_connections: requests at a time; others get 503.
        probe_s: time between two health checks of each engine, in seconds.

    Attributes:
        counts: outcomes so far, by name.

    Raises:
        ConfigError: there is no engine for a half.
    """

    def __init__(
        self,
        prefill: Sequence[ProxiedEngine],
        decode: Sequence[ProxiedEngine],
        *,
        max_connections: int = 512,
        timeouts: Timeouts | None = None,
        probe_s: float = 5.0,
    ) -> None:
        if not prefill or not decode:
            raise ConfigError("the proxy needs at least one --prefill URL and one --decode URL")
        self._prefill, self._decode = list(prefill), list(decode)
        self._max_connections, self._num_connections = max_connections, 0
        self._timeouts = timeouts or Timeouts()
        self._probe_s = probe_s
        self.counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except ProxyError as error:
                await _send_whole(send, error.status, {"content-type": "application/json"}, error.body)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Probe engines from start to shutdown."""
        await receive()
        probes = asyncio.create_task(self._probe_all())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        probes.cancel()
        await asyncio.gather(probes, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _probe_all(self) -> None:
        while True:
            await asyncio.gather(*(engine.probe() for engine in [*self._prefill, *self._decode]))
            await asyncio.sleep(self._probe_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health" and method == "GET":
            await self._send_health(send)
            return
        if path not in (*TEXT_PATHS, *PASSED_PATHS) or method not in ("GET", "POST"):
            raise ProxyError(
                404, f"the proxy has no {method} {path}; it has {', '.join((*TEXT_PATHS, *PASSED_PATHS))}"
            )
        with self._place():
            body = await _body_of(receive)
            headers = _passed(scope)
            work = self._relay(method, path, headers, body, send)
            await _unless_disconnected(work, receive)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Take a place among the connections. Raises ProxyError: there is none."""
        if self._num_connections >= self._max_connections:
            self.counts["refused"] += 1
            raise ProxyError(
                503, f"the proxy serves {self._max_connections} requests at a time; try again later"
            )
        self._num_connections += 1
        try:
            yield
        finally:
            self._num_connections -= 1

    async def _relay(self, method: str, path: str, headers: dict[str, str], body: bytes, send: Send) -> None:
        if method == "POST" and path in TEXT_PATHS:
            given = json_object(body)
            request = {name: value for name, value in given.items() if name != "kv_transfer_params"}
            params = await self._prefilled(path, headers, request) if _can_be_split(request) else None
            body = json.dumps(request).encode() if given else body
            if params is not None:
                asked = json.dumps(request | {"kv_transfer_params": params}).encode()
                if await self._decoded(path, headers, asked, send, withheld=REFUSED) not in REFUSED:
                    return
        await self._decoded(path, headers, body, send, method=method)

    # Prefill

    async def _prefilled(
        self, path: str, headers: dict[str, str], request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Have a prefill engine compute the prompt; returns its params, None if none does."""
        body = json.dumps(_prefill_request(request)).encode()
        for engine in in_order(self._prefill):
            try:
                async with engine.exchange("POST", path, headers, body, self._timeouts.reply_s) as reply:
                    content = await reply.whole(self._timeouts.reply_s)
            except LostEngineError as error:
                self._lose("prefill", engine, error)
                continue
            if reply.status == 200:
                self.counts["prefilled"] += 1
                params = json_object(content).get("kv_transfer_params")
                return params if isinstance(params, dict) else None
            logger.warning("%s answers %d to a prefill: %r", engine.url, reply.status, content[:SHOWN_BYTES])
            if reply.status < 500 and reply.status not in RETRIED:
                break
        self.counts["prefill_skipped"] += 1
        return None

    # Decode

    async def _decoded(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        send: Send,
        *,
        method: str = "POST",
        withheld: Container[int] = (),
    ) -> int:
        """Pass on the reply of the first decode engine that gives one, unless its status is `withheld`; returns that.

        Raises:
            ProxyError: none does.
        """
        busy: tuple[int, dict[str, str], bytes] | None = None
        for engine in in_order(self._decode):
            try:
                async with engine.exchange(method, path, headers, body, self._timeouts.reply_s) as reply:
                    if reply.is_stream and reply.status == 200:
                        await self._stream(reply, send)
                        return reply.status
                    content = await reply.whole(self._timeouts.reply_s)
            except LostEngineError as error:
                self._lose("decode", engine, error)
                continue
            if reply.status in RETRIED:
                busy = reply.status, _returned(reply), content
                continue
            if reply.status in withheld:
                self.counts["params_refused"] += 1
                shown = content[:SHOWN_BYTES]
                logger.warning(
                    "%s answers %d to the blocks of a prefill engine: %r", engine.url, reply.status, shown
                )
            else:
                await _send_whole(send, reply.status, _returned(reply), content)
            return reply.status
        if busy is None:
            raise ProxyError(503, "no decode engine works now; try again later")
        await _send_whole(send, *busy)
        return busy[0]

    async def _stream(self, reply: EngineReply, send: Send) -> None:
        """Pass on a stream.

        Raises:
            LostEngineError: it broke before its first event.
        """
        has_begun = False
        try:
            async for events in reply.events(self._timeouts.piece_s):
                if not has_begun:
                    has_begun = True
                    await send(_head(reply.status, _returned(reply)))
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if not has_begun:
                await send(_head(reply.status, _returned(reply)))
        except LostEngineError as error:
            if not has_begun:
                raise
            self._lose("decode", reply.engine, error)
            lost = ProxyError(502, "the engine was lost before the answer was complete")
            end = b"data: " + lost.body + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": end, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _lose(self, half: str, engine: ProxiedEngine, error: LostEngineError) -> None:
        self.counts[f"{half}_lost"] += 1
        engine.note(is_healthy=False, reason=str(error))

    async def _send_health(self, send: Send) -> None:
        """Answer 200 while a decode engine works, which can do without the others."""
        state = {
            name: {engine.url: engine.is_healthy for engine in engines}
            for name, engines in (("prefill", self._prefill), ("decode", self._decode))
        }
        status = 200 if any(state["decode"].values()) else 503
        content = json.dumps({**state, "num_requests": self._num_connections, "counts": self.counts}).encode()
        await _send_whole(send, status, {"content-type": "application/json"}, content)


def _can_be_split(request: dict[str, Any]) -> bool:
    """Return whether two engines can share a request: one prompt, no beams, no logprobs of it."""
    prompt = request.get("prompt")
    is_many = isinstance(prompt, list) and len(prompt) > 1 and not all(type(item) is int for item in prompt)
    alone = ("use_beam_search", "echo", "prompt_logprobs", "suffix")
    return bool(request) and not is_many and not any(request.get(name) for name in alone)


def _prefill_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the prefill engine's half of a request."""
    kept = {name: value for name, value in request.items() if name not in NOT_FOR_PREFILL}
    limits = {
        name: value for name, value in PREFILL_TOKENS.items() if name == "max_tokens" or name in request
    }
    return kept | limits | {"stream": False, "kv_transfer_params": ASKED}


def _passed(scope: Scope) -> dict[str, str]:
    """Return the headers for engines; both halves of a request have one id."""
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    kept = {name: given[name] for name in PASSED_HEADERS if name in given}
    return {"x-request-id": str(uuid.uuid4()), **kept}


def _returned(reply: EngineReply) -> dict[str, str]:
    return {name: reply.headers[name] for name in RETURNED_HEADERS if name in reply.headers}


async def _body_of(receive: Receive) -> bytes:
    """Return a request's body. Raises ProxyError: it is too large, or the client has gone."""
    content, is_open = bytearray(), True
    while is_open:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ProxyError(499, "the client has closed the connection")
        content += message.get("body", b"")
        if len(content) > MAX_BODY_BYTES:
            raise ProxyError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        is_open = message.get("more_body", False)
    return bytes(content)


async def _unless_disconnected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run work, and cancel it when the client goes; engines then notice that their connection is closed."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: Mapping[str, str]) -> Message:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def _send_whole(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await send(_head(status, {**headers, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body, "more_body": False})
