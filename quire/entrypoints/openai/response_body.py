"""The body of a response, for pieces that are to be written at once.

Invariant: `write` never waits, so no more is written than the connection's buffer takes: once that is full the body is
not open, until the client has read. ASGI's own way is for whatever may wait. Layers between application and server act
on the start of a response, and have nothing to do with the pieces of its body. Pieces are framed here as h11 frames
them, for whose state the body's pieces change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
from starlette.types import Scope

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

EXTENSION = "quire.response_body"
"""Where an ASGI scope has it, if the server that received the request offers it."""


class ResponseBody:
    """Of the answer to one request, whose length its headers do not state.

    Used by whoever awaits every `send` of it, and only between these.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_chunked = (cycle.conn.their_http_version or b"1.0") >= b"1.1"

    @property
    def is_open(self) -> bool:
        """Whether it has begun, is not over, and the client reads."""
        cycle = self._cycle
        is_sent = cycle.conn.our_state is h11.SEND_BODY
        return is_sent and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """A piece of it; to be called while it is open."""
        if data:  # a chunk of nothing would be the last one
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


def offer(scope: Scope, cycle: RequestResponseCycle) -> None:
    """Tell the application of the body that it may write."""
    scope["extensions"] = {**scope.get("extensions", {}), EXTENSION: ResponseBody(cycle)}


def body_of_response(scope: Scope) -> ResponseBody | None:
    """What the server offers, if it does."""
    body: ResponseBody | None = scope.get("extensions", {}).get(EXTENSION)
    return body
