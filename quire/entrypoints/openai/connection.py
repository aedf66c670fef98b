"""One HTTP connection, on uvicorn's, with an end to every wait for its client.

Invariant: a client that is slow, silent or gone keeps a connection for a bounded time, whatever it was doing, and more
connections than there are file descriptors for are answered at once instead of failing somewhere. A connection that is
cut ends its request, as a disconnect. A client that sends no more may listen or have gone: that shows by writing to it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import resource
import sys
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from quire.config import ServerConfig
from quire.entrypoints.openai.begun_answer import BegunAnswer
from quire.entrypoints.openai.census import Census
from quire.entrypoints.openai.errors import error_body, id_headers, response_of, shaped_error
from quire.entrypoints.openai.hosts import AllowedHosts
from quire.entrypoints.openai.response_body import offer
from quire.errors import (
    ClientError,
    ForbiddenError,
    HttpVersionError,
    QuireError,
    UnavailableError,
    ValidationError,
)

RESERVED_FILES = 64
"""Descriptors for all that is no admitted client: the core's sockets, files, and those who are told to come later."""
LEAST_CONNECTIONS = 8
MAX_EXTRA = 16
"""Connections beyond the limit that get an answer; those beyond these are closed without one."""
EXTRA_READ_S = 1.0
PROBE_S, MOST_PROBE_S = 0.05, 2.0
"""After so long a client that sends no more is written to again, each time after twice as long, up to the second."""
LEAST_PROGRESS_BYTES = 16 * 2**10
"""What a client must read within the write timeout, unless that empties the buffer."""
_HEAD_END = re.compile(rb"\n\r?\n")


def protocol_class(
    config: ServerConfig, census: Census, hosts: AllowedHosts
) -> functools.partial[Connection]:
    """What uvicorn makes for every connection; the census counts those of which there may not be too many."""
    return functools.partial(
        Connection, limits=config, max_connections=max_connections(config), census=census, hosts=hosts
    )


def max_connections(config: ServerConfig) -> int:
    """As configured, else what the limit of open files leaves."""
    if config.max_connections:
        return config.max_connections
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(LEAST_CONNECTIONS, num_files - RESERVED_FILES)


class Connection(H11Protocol):
    """Two clocks: one until the request has come in as a whole, one while the client leaves what it was sent unread."""

    def __init__(
        self,
        *args: Any,
        limits: ServerConfig,
        max_connections: int,
        census: Census,
        hosts: AllowedHosts,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._application: ASGIApp = self.app
        self.app = self._answer
        self._census = census
        self._hosts = hosts
        self._limits = limits
        self._max_connections = max_connections
        self._read_timeout = limits.read_timeout
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._begun: BegunAnswer | None = None
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_extra = self._census.num_open(self.connections) - self._max_connections
        if num_extra > MAX_EXTRA:
            transport.abort()
        elif num_extra > 0:
            self.app, self._read_timeout = self._come_later, min(EXTRA_READ_S, self._read_timeout)
        self._watch_reading()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            if not self.flow.write_paused:
                self._watch_writing_anew()  # whoever goes on asking has read what came before
            self._num_discarded = self._num_discarded + len(data) if self._discards else 0
            if self._num_discarded > self._limits.max_request_bytes:
                self.transport.abort()
                return
            super().data_received(data)
            self._watch_reading()

    def handle_events(self) -> None:
        """Refuse a head with folded lines, which others may read otherwise (RFC 9112, 5.2), before h11 joins them."""
        if self.conn.their_state is h11.IDLE and _has_folds(self.conn.trailing_data[0]):
            self.send_400_response("A header must not be folded over several lines.")
        else:
            super().handle_events()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; the connection stays for the answer to a request that is here as a whole.

        Unless that has begun already: then nothing shows that a client listens, which has most likely gone.
        """
        is_awaited = self.cycle is not None and self.conn.our_state is h11.SEND_RESPONSE
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        self._is_half_closed = is_awaited and is_whole
        if self._is_half_closed:
            assert self.cycle is not None, "its answer is awaited"
            if (self.conn.their_http_version or b"") < b"1.1":  # to which nothing can be sent but the answer
                self._begun = BegunAnswer(self.transport)
                self.cycle.transport = self._begun  # type: ignore[assignment]
            self._probe(PROBE_S)
        return self._is_half_closed

    def _probe(self, next_in_s: float) -> None:
        """Whoever listens passes over this; where nobody does, the connection is lost by it, or by the next."""
        if self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing():
            if self._begun is None:
                interim = h11.InformationalResponse(status_code=100, headers=[], reason=STATUS_PHRASES[100])
                self.transport.write(self.conn.send(interim) or b"")
            else:
                self._begun.begin()
            most = MOST_PROBE_S if self._begun is None else math.inf  # there are so many bytes and no more
            again = min(2 * next_in_s, most)
            self._probe_timer = self.loop.call_later(next_in_s, self._probe, again)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._read_timer, self._write_timer, self._probe_timer)
        super().connection_lost(exc)
        self._census.leave()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # there will be no other request
        self._watch_reading()
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing_anew()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing_anew()

    def _watch_reading(self) -> None:
        """The clock runs while a request is awaited; where one has been answered, that is keep-alive's business."""
        if self.transport.is_closing() or not self._awaits_more:
            _cancel(self._read_timer)
            self._read_timer = None
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self._read_timeout, self._on_read_timeout)

    @property
    def _awaits_more(self) -> bool:
        """Whether the client has a request to begin or to finish."""
        if self.conn.their_state is h11.SEND_BODY:
            return True
        is_first = self.cycle is None
        return self.conn.their_state is h11.IDLE and (is_first or bool(self.conn.trailing_data[0]))

    @property
    def _discards(self) -> bool:
        """Whether the client goes on sending a body that has been answered; some read only when all is sent."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _on_read_timeout(self) -> None:
        """Say so, if nothing has been answered yet, and hang up."""
        self._read_timer = None
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_408()
        self.transport.close()
        self._watch_writing()

    def _send_408(self) -> None:
        message = f"the request did not come in within {self._read_timeout:g} seconds (--read-timeout)"
        is_known = self.conn.their_state is h11.SEND_BODY  # else nobody knows what was to be asked
        scope = self.scope if is_known else {"path": ""}
        body = shaped_error(error_body(message, "RequestTimeoutError", 408), 408, scope)
        headers = [
            (b"content-type", b"application/json"),
            *id_headers(scope),
            (b"connection", b"close"),
        ]
        head = h11.Response(status_code=408, headers=headers, reason=STATUS_PHRASES[408])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, which may write to the response's body at once; or the refusal of a request for none."""
        assert self.cycle is not None
        error = self._refusal(scope)
        if error is not None:
            await _refuse(error, scope, receive, send)
            return
        if scope["method"] != "HEAD":
            offer(scope, self.cycle)
        await self._application(scope, receive, send)

    async def _come_later(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection beyond the limit."""
        message = f"the server has {self._max_connections} connections, which is its limit; try again later"
        await _refuse(UnavailableError(message), scope, receive, send)

    def _refusal(self, scope: Scope) -> ClientError | None:
        """What is wrong with how the request came, whatever it asks for."""
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
            f"the Host header {host!r:.80} is no name of this server; --allowed-hosts names those that it has "
            "besides localhost and addresses"
        )

    def _watch_writing(self) -> None:
        """The clock runs while bytes wait for the client and nothing but its reading can free them."""
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
        """Whether no more is written before the client reads."""
        is_over = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        return self.flow.write_paused or is_over


def _has_folds(received: bytes) -> bool:
    """Whether a line of the head, as far as it is here, begins with white space."""
    head = _HEAD_END.split(received, 1)[0]
    return b"\n " in head or b"\n\t" in head


async def _refuse(error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, and close: bytes that follow may be anything."""
    response = response_of(error, "unknown")
    ids = {name.decode(): value.decode() for name, value in id_headers(scope)}
    response.headers.update({"connection": "close", **ids})
    await response(scope, receive, send)


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
