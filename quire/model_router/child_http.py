# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 client for one request to a child's Unix socket.

Invariant: a response is passed on as it arrives, and at most `READ_BYTES` of it are held. A closed connection tells the
child that its client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import h11

READ_BYTES = 64 * 2**10
MAX_HEAD_BYTES = 64 * 2**10
Headers = Iterable[tuple[bytes, bytes]]


class ChildLostError(Exception):
    """Connection that the child did not accept, or did not bring to its end."""


class ChildRefusedError(ChildLostError):
    """Connection that no process accepts any more; nothing was sent."""


class ChildExchange:
    """One request and its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> h11.Response:
        """Send the request; return the head of the response.

        Raises:
            ChildLostError: the child ended before.
        """
        lines = [(b"host", b"localhost"), (b"connection", b"close"), *headers]
        if body or method in ("POST", "PUT", "PATCH"):
            lines.append((b"content-length", b"%d" % len(body)))
        request = h11.Request(method=method, target=target, headers=lines)
        try:
            for event in (request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()):
                self._writer.write(self._http.send(event) or b"")
            await self._writer.drain()
        except (h11.LocalProtocolError, OSError) as error:
            if isinstance(error, h11.LocalProtocolError):
                raise
            # The child may have answered before it read all of the body.
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the response's body as it arrives.

        Raises:
            ChildLostError: the child ended before it was complete.
        """
        while not isinstance(event := await self._next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def _next_event(self) -> h11.Event:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ_BYTES))
        except (h11.RemoteProtocolError, OSError) as error:
            raise ChildLostError(str(error)) from None
        if not isinstance(event, h11.Event):
            raise ChildLostError("the child changed the protocol")
        if isinstance(event, h11.ConnectionClosed):
            raise ChildLostError("the child closed the connection")
        return event


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[ChildExchange]:
    """Connect to a child, for one request.

    Raises:
        ChildRefusedError: nothing listens there.
        ChildLostError: the connection fails otherwise.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=READ_BYTES)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise ChildRefusedError(str(error)) from None
    except OSError as error:
        raise ChildLostError(str(error)) from None
    try:
        yield ChildExchange(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def status_of(path: str, method: str, target: str, headers: Headers = ()) -> int:
    """Send a request without a body; return the status of its response.

    Raises:
        ChildLostError: the child did not answer.
    """
    async with connected(path) as exchange:
        head = await exchange.send(method, target.encode(), headers, b"")
        async for _ in exchange.chunks():
            pass
        return int(head.status_code)
