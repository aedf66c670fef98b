"""An answer of which the first bytes are written before anybody knows what it will be.

Every answer begins with the same bytes. One of them shows whether a client of HTTP/1.0 that sends no more still
listens: where nobody does, the connection is lost by it, or by the next.
"""

from __future__ import annotations

import asyncio
from typing import Any

FIRST = b"HTTP/1.1 "
"""h11 writes it whatever the version of the request."""


class BegunAnswer:
    """A connection's transport, for whoever writes the whole answer to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def begin(self) -> None:
        """Write the next of the first bytes, if one is left; only before the answer."""
        if self._num_sent < len(FIRST):
            self._transport.write(FIRST[self._num_sent : self._num_sent + 1])
            self._num_sent += 1

    def write(self, data: bytes) -> None:
        """What is left of a piece of the answer."""
        num_sent, self._num_sent = self._num_sent, 0
        assert data.startswith(FIRST[:num_sent]), "the answer begins otherwise"
        self._transport.write(data[num_sent:])
