# SPDX-License-Identifier: Apache-2.0
"""Engines behind the proxy: their addresses, health and load, and HTTP exchanges with them.

Invariant: a connection serves one exchange, and is closed when that ends, however it ends. No wait is unbounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.entrypoints.cli.client import LINE_LIMIT, read_body, read_head
from quire.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

CONNECT_S = 3.0
PROBE_S = 3.0
LOST_AFTER = 3
"""Probes in a row without an answer after which requests that wait for a reply wait no longer."""
MAX_REPLY_BYTES = 2**26
SHOWN_BYTES = 200


class LostEngineError(EngineError):
    """The engine cannot be reached, broke the connection, was too slow or sent no HTTP."""


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds: of a whole prefill or buffered reply, and between two pieces of a stream."""

    reply_s: float = 600.0
    piece_s: float = 120.0


class ProxiedEngine:
    """One engine; `is_healthy` is as of its last probe or request.

    Args:
        url: http://HOST:PORT.

    Raises:
        ConfigError: the URL is another.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if (
            parts.scheme != "http"
            or not parts.hostname
            or not port
            or parts.path.strip("/")
            or "@" in parts.netloc
        ):
            raise ConfigError(f"an engine must be http://HOST:PORT, got {url!r}")
        self.url = f"http://{parts.netloc}"
        self._host, self._port, self._authority = parts.hostname, port, parts.netloc
        self.is_healthy = True
        self.num_in_flight = 0
        self._num_unanswered = 0  # probes in a row
        self._waits: set[asyncio.Timeout] = set()  # of requests without a reply yet

    def note(self, *, is_healthy: bool, reason: str = "") -> None:
        """Record whether the engine works; a change is logged."""
        if is_healthy != self.is_healthy:
            logger.warning("%s %s", self.url, "works again" if is_healthy else f"is not used: {reason}")
        self.is_healthy = is_healthy

    async def probe(self) -> None:
        """Record whether the engine says that it is healthy."""
        try:
            async with asyncio.timeout(PROBE_S), self.exchange("GET", "/health", {}, b"", PROBE_S) as reply:
                await reply.whole(PROBE_S)
        except (LostEngineError, TimeoutError) as error:
            self.note(is_healthy=False, reason=str(error) or "it does not answer")
            self._num_unanswered += 1
            if self._num_unanswered >= LOST_AFTER:
                for wait in (one for one in self._waits if not one.expired()):
                    wait.reschedule(asyncio.get_running_loop().time())
        else:
            self._num_unanswered = 0
            self.note(is_healthy=reply.status == 200, reason=f"it answers {reply.status}")

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, head_s: float
    ) -> AsyncIterator[EngineReply]:
        """Send a request and yield the reply, whose head comes within `head_s` seconds.

        Raises:
            LostEngineError: there was no reply; also from the reply's methods.
        """
        self.num_in_flight += 1
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_LIMIT)
            async with asyncio.timeout(head_s) as wait:
                self._waits.add(wait)
                try:
                    writer.write(self._request(method, path, headers, body))
                    await writer.drain()
                    status, replied = await read_head(reader)
                finally:
                    self._waits.remove(wait)
            async with aclosing(read_body(reader, replied)) as pieces:
                yield EngineReply(self, status, replied, pieces)
        except (OSError, EOFError, TimeoutError, EngineError, ValueError) as error:
            if isinstance(error, LostEngineError):
                raise
            raise LostEngineError(f"{self.url}: {_reason_of(error)}") from error
        finally:
            self.num_in_flight -= 1
            if writer is not None:
                writer.close()

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._authority}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass
class EngineReply:
    """Reply of an engine, whose body is read once."""

    engine: ProxiedEngine
    status: int
    headers: Mapping[str, str]
    _pieces: AsyncIterator[bytes]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def whole(self, within_s: float) -> bytes:
        """Return the body. Raises LostEngineError: it did not end in time, or is too large."""
        content = bytearray()
        with self._as_lost():
            async with asyncio.timeout(within_s):
                async for piece in self._pieces:
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        raise EngineError(f"its reply has more than {MAX_REPLY_BYTES} bytes")
        return bytes(content)

    async def events(self, piece_s: float) -> AsyncIterator[bytes]:
        """Yield whole server-sent events. Raises LostEngineError: the stream broke, or is too slow."""
        pending = b""
        with self._as_lost():
            while True:
                async with asyncio.timeout(piece_s):
                    piece = await anext(self._pieces, None)
                if piece is None:
                    break
                whole, mark, pending = (pending + piece).rpartition(b"\n\n")
                if len(pending) > MAX_REPLY_BYTES:
                    raise EngineError(f"an event has more than {MAX_REPLY_BYTES} bytes")
                if mark:
                    yield whole + mark
        if pending:
            yield pending

    @contextlib.contextmanager
    def _as_lost(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, TimeoutError, EngineError, ValueError) as error:
            raise LostEngineError(f"{self.engine.url}: {_reason_of(error)}") from error


def _reason_of(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it closed the connection before its reply was complete"
    return "it is too slow" if isinstance(error, TimeoutError) else str(error)


def in_order(engines: Sequence[ProxiedEngine]) -> list[ProxiedEngine]:
    """Return engines in the order in which to try them: healthy ones with the least load first."""
    return sorted(engines, key=lambda engine: (not engine.is_healthy, engine.num_in_flight))


def json_object(content: bytes) -> dict[str, Any]:
    """Return a JSON object; empty if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
