"""Server-sent events.

Invariant: a stream that began ends with `data: [DONE]`, after the frames of a complete answer or after exactly
one error frame; only a client that is gone gets neither.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.openai.errors import frame_of, request_id_of
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.in_flight import ClientDisconnectedError, InFlight

DONE = b"data: [DONE]\n\n"


def frame(chunk: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class EventStream(Response):
    """Sends `frames`, which are made from `outputs`, while the client is there."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], outputs: Outputs, in_flight: InFlight) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._outputs = outputs
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._outputs), aclosing(self._frames):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_frames(send), receive)
            except ClientDisconnectedError:
                return
            except Exception as error:  # the response has begun: the only way left to tell the client
                await _send(send, frame_of(error, request_id_of(scope)))
            await _send(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, send: Send) -> None:
        async for data in self._frames:
            await _send(send, data)


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
