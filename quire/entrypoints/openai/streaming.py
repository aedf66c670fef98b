"""Answers that are sent in pieces.

Invariant: a stream that began ends with what its `Wire` says (OpenAI's: `data: [DONE]`), after the frames of a complete
answer or after exactly one error frame; only a client that is gone gets neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.openai.errors import frame_of, request_id_of
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.in_flight import ClientDisconnectedError, InFlight
from quire.entrypoints.openai.keep_alive import KeepAlive
from quire.entrypoints.openai.response_body import ResponseBody, body_of_response
from quire.outputs import RequestOutput

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def frame(chunk: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: " + _encode(chunk) + b"\n\n"


class TextFrame:
    """An event of which only one text changes: the bytes around that text are made once."""

    MARK = "\0text\0"

    def __init__(self, chunk: msgspec.Struct) -> None:
        """`chunk` has `MARK` wherever the text goes."""
        self._around = frame(chunk).split(_encode(self.MARK))
        assert len(self._around) > 1, "the chunk has no mark"

    def of(self, text: str) -> bytes:
        """`frame` of the chunk with this text."""
        return _encode(text).join(self._around)


@dataclass(frozen=True)
class Wire:
    """Form of one API's streams.

    Attributes:
        error: the bytes that end a stream with an error, given the request's id.
        end: the bytes that end each stream.
        ping: bytes without meaning, sent while there is nothing else to send; empty where the format has none.
    """

    media_type: str
    error: Callable[[BaseException, str], bytes]
    end: bytes = b""
    ping: bytes = b""


COMMENT = b":\n\n"  # a line that readers of event streams skip
OPENAI_WIRE = Wire("text/event-stream", frame_of, DONE, COMMENT)


class Frames(Protocol):
    """Writes one stream, up to but without what its `Wire` ends it with."""

    def of(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events that an output adds."""
        ...

    def closing(self) -> bytes:
        """Those behind the last output."""
        ...


class EventStream(Response):
    """Sends the frames of `outputs`, while the client is there.

    A step of the engine has news for many streams. An output that finds its stream ready is written where it is
    handed over, without a switch to this stream's task and without the layers of ASGI.
    """

    def __init__(
        self, frames: Frames, outputs: Outputs, in_flight: InFlight, wire: Wire, keep_alive_s: float
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=wire.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._outputs = outputs
        self._in_flight = in_flight
        self._wire = wire
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = body_of_response(scope)
        keep_alive = KeepAlive(send, self._wire.ping, self._keep_alive_s)
        if body is not None:
            self._outputs.offer_to(partial(self._wrote, body, keep_alive))
        async with aclosing(self._outputs):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_frames(send, keep_alive), receive)
            except ClientDisconnectedError:
                return
            except Exception as error:  # the response has begun: the only way left to tell the client
                await _send(send, self._wire.error(error, request_id_of(scope)))
            await send({"type": "http.response.body", "body": self._wire.end, "more_body": False})

    async def _send_frames(self, send: Send, keep_alive: KeepAlive) -> None:
        async with keep_alive:
            async for index, output in self._outputs:
                data = self._frames.of(index, output)
                if data:
                    keep_alive.count_sent()
                    await _send(send, data)
        await _send(send, self._frames.closing())

    def _wrote(self, body: ResponseBody, keep_alive: KeepAlive, index: int, output: RequestOutput) -> bool:
        if not body.is_open:
            return False
        data = self._frames.of(index, output)
        if data:
            keep_alive.count_sent()
            body.write(data)
        return True


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
