# SPDX-License-Identifier: Apache-2.0
"""HTTP connections on uvicorn's h11 protocol, with a time limit on every wait for the client.

Invariant: a slow, silent or disconnected client holds a connection for a bounded time. Connections beyond the
file-descriptor limit are answered at once. A cut connection ends its request like a disconnect. Whether a half-closed
client still reads is found out by writing to it (`ProbeTransport`).
`ResponseBody` writes pieces of a body without ASGI and without waiting: it is open only while the transport's buffer
accepts data. Middleware acts on the response's start, never on these pieces. Pieces are framed as h11 frames them; body
data does not change h11's state.
`KeepAlive` sends pings in silent streams (queueing, prefill, buffered tool calls): proxies close idle connections after
a minute (nginx, ALB: 60 s, Cloudflare: 120 s), and clients then retry.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import resource
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from quire.config import ServerConfig
from quire.entrypoints.openai.connection_count import ConnectionCount
from quire.entrypoints.openai.errors import error_body, id_headers, response_of, shaped_error
from quire.entrypoints.openai.middleware.allowed_hosts import AllowedHosts
from quire.entrypoints.openai.middleware.body_limit import AUDIO_PATHS
from quire.entrypoints.openai.tls import tls_options
from quire.errors import (
    ClientError,
    ForbiddenError,
    HttpVersionError,
    QuireError,
    UnavailableError,
    ValidationError,
)
from quire.logging_setup import hide_probes, hide_queries

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

MAX_HEADER_BYTES = 64 * 2**10
MAX_WEBSOCKET_BYTES = 2**20  # of a message
KEEP_ALIVE_S = 5
GRACEFUL_SHUTDOWN_S = 5

FIRST_BYTES = b"HTTP/1.1 "  # h11 writes this version whatever the version of the request.

# Key in the ASGI scope's extensions, if the receiving server offers direct writes.
BODY_EXTENSION = "quire.response_body"
RESERVED_FILES = 64  # File descriptors reserved for the core's sockets, files and rejected clients.
LEAST_CONNECTIONS = 8
MAX_EXTRA = 16  # Connections beyond the limit that get a 503; further ones are closed without a response.
EXTRA_READ_S = 1.0
# Delay of the first probe of a half-closed client, doubled each time, up to the second value.
PROBE_S, MOST_PROBE_S = 0.05, 2.0
# Bytes that a client must read within the write timeout, unless the buffer empties.
LEAST_PROGRESS_BYTES = 16 * 2**10
_HEAD_END = re.compile(rb"\n\r?\n")


class ProbeTransport:
    """Transport wrapper that can send "HTTP/1.1 " byte by byte before the response.

    Every response begins with these bytes, so they show whether a half-closed HTTP/1.0 client still reads: if not, the
    connection is reset by this byte or the next.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def begin(self) -> None:
        """Send the next of the first bytes, if one is left; only before the response."""
        if self._num_sent < len(FIRST_BYTES):
            self._transport.write(FIRST_BYTES[self._num_sent : self._num_sent + 1])
            self._num_sent += 1

    def write(self, data: bytes) -> None:
        """Write a piece of the response without the bytes already sent."""
        num_sent, self._num_sent = self._num_sent, 0
        assert data.startswith(FIRST_BYTES[:num_sent]), "the answer begins otherwise"
        self._transport.write(data[num_sent:])


class ResponseBody:
    """Direct writer of one response body without a declared length.

    The caller must await every `send`, and write between these only.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_chunked = (cycle.conn.their_http_version or b"1.0") >= b"1.1"

    @property
    def is_open(self) -> bool:
        """True once the body has begun, until it is complete, while the client reads."""
        cycle = self._cycle
        is_sent = cycle.conn.our_state is h11.SEND_BODY
        return is_sent and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a piece; only while the body is open."""
        if data:  # an empty chunk would end the body
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


def offer_body(scope: Scope, cycle: RequestResponseCycle) -> None:
    """Offer the application direct writes to the response body."""
    scope["extensions"] = {**scope.get("extensions", {}), BODY_EXTENSION: ResponseBody(cycle)}


def body_of_response(scope: Scope) -> ResponseBody | None:
    """Return the direct writer that the server offers, if any."""
    body: ResponseBody | None = scope.get("extensions", {}).get(BODY_EXTENSION)
    return body


class KeepAlive:
    """Context manager that sends `ping` whenever the enclosed stream was silent for an interval.

    Args:
        send: ASGI channel of a response that has begun. Every message is complete, so a ping may come between any two.
        ping: the API's no-op bytes; if empty, nothing is sent.
        interval_s: seconds; 0: never.
    """

    def __init__(self, send: Send, ping: bytes, interval_s: float) -> None:
        self._send = send
        self._ping = ping
        self._interval_s = interval_s
        self._num_sent = 0
        self._task: asyncio.Task[None] | None = None

    def count_sent(self) -> None:
        """Record that the stream has sent something."""
        self._num_sent += 1

    async def __aenter__(self) -> KeepAlive:
        if self._ping and self._interval_s:
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is None:
            return
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if error is None and isinstance(ended, Exception):
            raise ended

    async def _run(self) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self._interval_s)
            if num_sent == self._num_sent:
                await self._send({"type": "http.response.body", "body": self._ping, "more_body": True})


def protocol_class(
    config: ServerConfig,
    connection_count: ConnectionCount,
    hosts: AllowedHosts,
    websocket_path: str | None = None,
) -> functools.partial[Connection]:
    """Return uvicorn's protocol factory."""
    return functools.partial(
        Connection,
        limits=config,
        max_connections=max_connections(config),
        connection_count=connection_count,
        hosts=hosts,
        websocket_path=websocket_path,
    )


def max_connections(config: ServerConfig) -> int:
    """Return the configured limit, else one derived from the limit of open files."""
    if config.max_connections:
        return config.max_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(LEAST_CONNECTIONS, num_files - RESERVED_FILES)


class Connection(H11Protocol):
    """Connection with two timers: one until the request is complete, one while the client leaves sent data unread."""

    def __init__(
        self,
        *args: Any,
        limits: ServerConfig,
        max_connections: int,
        connection_count: ConnectionCount,
        hosts: AllowedHosts,
        websocket_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._websocket_path = websocket_path
        self._is_websocket = False
        self._application: ASGIApp = self.app
        self.app = self._answer
        self._connection_count = connection_count
        self._hosts = hosts
        self._limits = limits
        self._max_connections = max_connections
        self._read_timeout = limits.read_timeout
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._begun: ProbeTransport | None = None
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_extra = self._connection_count.num_open(self.connections) - self._max_connections
        if num_extra > MAX_EXTRA:
            transport.abort()
        elif num_extra > 0:
            self.app, self._read_timeout = self._refuse_excess, min(EXTRA_READ_S, self._read_timeout)
        self._watch_reading()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            if not self.flow.write_paused:
                # a client that sends another request has read the previous response
                self._watch_writing_anew()
            self._num_discarded = self._num_discarded + len(data) if self._discards else 0
            if self._num_discarded and self._num_discarded > self._most_discarded:
                self.transport.abort()
                return
            super().data_received(data)
            self._watch_reading()

    def handle_events(self) -> None:
        """Reject folded header lines, which others may parse differently (RFC 9112, 5.2), before h11 joins them."""
        if self.conn.their_state is h11.IDLE and _has_folds(self.conn.trailing_data[0]):
            self.send_400_response("A header must not be folded over several lines.")
        else:
            super().handle_events()

    def _should_upgrade(self) -> bool:
        """Upgrade requests for the one path of WebSockets; any other such request is answered as plain HTTP."""
        scope = cast(Scope, self.scope)
        is_ours = self._websocket_path is not None and scope["path"] == self._websocket_path
        takes = is_ours and self.app == self._answer and self._refusal(scope) is None
        return takes and super()._should_upgrade()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over; it counts until the other protocol has lost it."""
        self._is_websocket = True
        _cancel(self._read_timer, self._write_timer, self._probe_timer)
        super().handle_websocket_upgrade(event)
        socket = self.transport.get_protocol()
        lost = socket.connection_lost

        def lose(error: Exception | None) -> None:
            lost(error)
            self._connection_count.leave()

        socket.connection_lost = lose  # type: ignore[assignment]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open until the answer to its complete request has begun.

        Once the answer has begun, nothing shows whether the client still reads; most likely it has disconnected.
        """
        is_awaited = self.cycle is not None and self.conn.our_state is h11.SEND_RESPONSE
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        self._is_half_closed = is_awaited and is_whole
        if self._is_half_closed:
            assert self.cycle is not None, "its answer is awaited"
            if (self.conn.their_http_version or b"") < b"1.1":  # HTTP/1.0 has no interim responses
                self._begun = ProbeTransport(self.transport)
                self.cycle.transport = self._begun  # type: ignore[assignment]
            self._probe(PROBE_S)
        return self._is_half_closed

    def _probe(self, next_in_s: float) -> None:
        """Send 100 Continue, or the response's next first byte; if the client is gone, this or the next write fails."""
        if self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing():
            if self._begun is None:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason=STATUS_PHRASES[100])
                self.transport.write(self.conn.send(interim) or b"")
            else:
                self._begun.begin()
            most = MOST_PROBE_S if self._begun is None else math.inf  # the number of these bytes is limited
            again = min(2 * next_in_s, most)
            self._probe_timer = self.loop.call_later(next_in_s, self._probe, again)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._read_timer, self._write_timer, self._probe_timer)
        super().connection_lost(exc)
        self._connection_count.leave()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # no further request can come
        self._watch_reading()
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing_anew()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing_anew()

    def _watch_reading(self) -> None:
        """Start or stop the read timer: it runs while a request is expected. Between requests keep-alive's
        timer runs."""
        if self.transport.is_closing() or self._is_websocket or not self._awaits_more:
            _cancel(self._read_timer)
            self._read_timer = None
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self._read_timeout, self._on_read_timeout)

    @property
    def _awaits_more(self) -> bool:
        """True if the client has a request to begin or to finish."""
        if self.conn.their_state is h11.SEND_BODY:
            return True
        is_first = self.cycle is None
        return self.conn.their_state is h11.IDLE and (is_first or bool(self.conn.trailing_data[0]))

    @property
    def _most_discarded(self) -> int:
        """Bytes after which a client that goes on sending is cut off: those of a body; of sounds twice as many."""
        limits, scope = self._limits, cast(Scope, self.scope)
        is_audio = scope["path"].removeprefix(limits.root_path) in AUDIO_PATHS
        return 2 * limits.max_audio_bytes if is_audio else limits.max_request_bytes

    @property
    def _discards(self) -> bool:
        """True while the client sends the rest of a body that is answered; some clients read only after sending."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _on_read_timeout(self) -> None:
        """Answer 408 if nothing was answered yet, and close."""
        self._read_timer = None
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_408()
        self.transport.close()
        self._watch_writing()

    def _send_408(self) -> None:
        message = f"the request did not come in within {self._read_timeout:g} seconds (--read-timeout)"
        is_known = self.conn.their_state is h11.SEND_BODY  # otherwise the request's path is unknown
        scope = self.scope if is_known else {"path": ""}
        body = shaped_error(error_body(message, "RequestTimeoutError", 408), 408, scope)
        headers = [(b"content-type", b"application/json"), *id_headers(scope), (b"connection", b"close")]
        head = h11.Response(status_code=408, headers=headers, reason=STATUS_PHRASES[408])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with direct body writes enabled, or reject a malformed request."""
        assert self.cycle is not None
        error = self._refusal(scope)
        if error is not None:
            await _refuse(error, scope, receive, send)
            return
        if scope["method"] != "HEAD":
            offer_body(scope, self.cycle)
        await self._application(scope, receive, send)

    async def _refuse_excess(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection beyond the limit with 503."""
        message = f"the server has {self._max_connections} connections, which is its limit; try again later"
        await _refuse(UnavailableError(message), scope, receive, send)

    def _refusal(self, scope: Scope) -> ClientError | None:
        """Return the error of a request that is malformed whatever its path."""
        version, headers = scope["http_version"], dict(scope["headers"])
        if not version.startswith("1."):
            return HttpVersionError(
                f"the request is of HTTP/{version}; this server speaks HTTP/1.1 and HTTP/1.0"
            )
        if version == "1.0" and b"transfer-encoding" in headers:
            return ValidationError("a request of HTTP/1.0 must have its length in Content-Length")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return ValidationError("a body must have Content-Length or Transfer-Encoding, not both")
        host = self._hosts.refused(scope)
        if host is None:
            return None
        return ForbiddenError(
            f"the Host header {host!r:.80} is not a name of this server; --allowed-hosts lists allowed names "
            "besides localhost and addresses"
        )

    def _watch_writing(self) -> None:
        """Start the write timer if unread data can only be freed by the client."""
        num_bytes = self.transport.get_write_buffer_size()
        if self._write_timer is None and num_bytes:
            self._write_timer = self.loop.call_later(
                self._limits.write_timeout, self._on_write_timeout, num_bytes
            )

    def _watch_writing_anew(self) -> None:
        _cancel(self._write_timer)
        self._write_timer = None
        self._watch_writing()

    def _on_write_timeout(self, num_before: int) -> None:
        self._write_timer = None
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes > max(0, num_before - LEAST_PROGRESS_BYTES) and self._waits_for_reader:
            self.transport.abort()
        else:
            self._watch_writing()

    @property
    def _waits_for_reader(self) -> bool:
        """True if nothing more is written before the client reads."""
        is_over = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        return self.flow.write_paused or is_over


def _has_folds(received: bytes) -> bool:
    """Return whether a line of the received part of the head begins with white space."""
    head = _HEAD_END.split(received, 1)[0]
    return b"\n " in head or b"\n\t" in head


async def _refuse(error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error and close, because the following bytes cannot be trusted."""
    response = response_of(error, "unknown")
    ids = {name.decode(): value.decode() for name, value in id_headers(scope)}
    response.headers.update({"connection": "close", **ids})
    await response(scope, receive, send)


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


def http_config(
    app: FastAPI, config: ServerConfig, connection_count: ConnectionCount | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings. Uses h11 because it bounds the size of headers and rejects ambiguous ones."""
    hide_queries()
    hide_probes(path for entry in config.disable_access_log_for_endpoints for path in entry.split(","))
    path: str | None = getattr(app.state, "websocket_path", None)
    return uvicorn.Config(
        app,
        http=protocol_class(
            config,
            connection_count or ConnectionCount(),
            AllowedHosts(config, has_keys=bool(app.state.server.keys)),
            path,
        ),  # type: ignore[arg-type]
        ws="none" if path is None else "websockets-sansio",
        ws_max_size=MAX_WEBSOCKET_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        root_path=config.root_path,
        log_config=None,  # uvicorn's config would write to pipes that may be full or closed
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        **tls_options(config),
    )
