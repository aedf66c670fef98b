# SPDX-License-Identifier: Apache-2.0
"""Responses of all generating endpoint families, whole or streamed.

Invariant: a stream that has begun ends with its format's `end` (OpenAI's: `data: [DONE]`), after the frames of a
complete answer or after exactly one error frame; only a disconnected client gets neither. The client's connection is
watched from the request to the end. Errors before a stream begins have their proper status. A request reserves its
place in the queue before it costs anything, and releases it however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.openai.connection import KeepAlive, ResponseBody, body_of_response
from quire.entrypoints.openai.errors import frame_of, json_response, request_id_of
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.in_flight import ClientDisconnectedError, InFlight
from quire.entrypoints.openai.protocol.requests import GenerationRequest
from quire.entrypoints.openai.sampling import client_names
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import apply_request_settings
from quire.errors import DeadlineError
from quire.outputs import RequestOutput

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode

COMMENT = b":\n\n"  # ignored by readers of event streams
HEAD_AFTER_S = 1.0  # later errors are sent as events, with status 200


def frame(chunk: msgspec.Struct) -> bytes:
    """Encode one event."""
    return b"data: " + _encode(chunk) + b"\n\n"


class TextFrame:
    """Pre-encoded event in which only one text varies."""

    MARK = "\0text\0"

    def __init__(self, chunk: msgspec.Struct) -> None:
        """Encode `chunk`, which has `MARK` in place of the text."""
        self._around = frame(chunk).split(_encode(self.MARK))
        assert len(self._around) > 1, "the chunk has no mark"

    def with_text(self, text: str) -> bytes:
        """Return the event with this text."""
        return _encode(text).join(self._around)


@dataclass(frozen=True)
class StreamFormat:
    """Stream format of one API.

    Attributes:
        error: returns the bytes that end a stream with an error, given the request's id.
        end: bytes that end each stream.
        ping: no-op bytes sent in silent streams; empty if the format has none.
    """

    media_type: str
    error: Callable[[BaseException, str], bytes]
    end: bytes = b""
    ping: bytes = b""


OPENAI_FORMAT = StreamFormat("text/event-stream", frame_of, DONE, COMMENT)


class FrameEncoder(Protocol):
    """Encoder of one stream, without the format's `end`."""

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return the events of an output."""
        ...

    def closing(self) -> bytes:
        """Return the events after the last output."""
        ...


class EventStream(Response):
    """Response that sends the frames of `outputs` while the client is connected.

    An engine step produces outputs for many streams. If its stream is ready, an output is written where it arrives,
    without a task switch and without ASGI layers.
    """

    def __init__(
        self,
        frames: FrameEncoder,
        outputs: Outputs,
        in_flight: InFlight,
        stream_format: StreamFormat,
        keep_alive_s: float,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=stream_format.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._outputs = outputs
        self._in_flight = in_flight
        self._format = stream_format
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = body_of_response(scope)
        keep_alive = KeepAlive(send, self._format.ping, self._keep_alive_s)
        if body is not None:
            self._outputs.offer_to(partial(self._wrote, body, keep_alive))
        async with aclosing(self._outputs):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_frames(send, keep_alive), receive)
            except ClientDisconnectedError:
                return
            except Exception as error:  # the response has begun, so the error must be an event
                await _send(send, self._format.error(error, request_id_of(scope)))
            await send({"type": "http.response.body", "body": self._format.end, "more_body": False})

    async def _send_frames(self, send: Send, keep_alive: KeepAlive) -> None:
        async with keep_alive:
            async for index, output in self._outputs:
                data = self._frames.encode(index, output)
                if data:
                    keep_alive.count_sent()
                    await _send(send, data)
        await _send(send, self._frames.closing())

    def _wrote(self, body: ResponseBody, keep_alive: KeepAlive, index: int, output: RequestOutput) -> bool:
        if not body.is_open:
            return False
        data = self._frames.encode(index, output)
        if data:
            keep_alive.count_sent()
            body.write(data)
        return True


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


class AnswerWriter(Protocol):
    """Response writer of one endpoint family."""

    @property
    def num_sequences(self) -> int:
        """Number of requested sequences, at most `MAX_SEQUENCES`.

        Raises:
            ValidationError: the prompts are malformed.
        """
        ...

    async def start(self, place: QueueReservation) -> Outputs:
        """Check the request and submit it to the engine at this place; it runs once its outputs are read."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """Return the answer as JSON, from the final output of each prompt."""
        ...

    def frames(self, prompt_lengths: list[int]) -> FrameEncoder:
        """Return the encoder of the streamed answer."""
        ...


async def respond(
    request: Request,
    body: GenerationRequest,
    answer: AnswerWriter,
    stream_format: StreamFormat = OPENAI_FORMAT,
) -> Response:
    """Generate, and return the answer whole or as a stream."""
    server = server_of(request)
    in_flight = server.in_flight
    apply_request_settings(request, body)
    with client_names(body), server.engine.reserve(answer.num_sequences) as place:
        if not body.stream:
            finals = await in_flight.run(_finals(answer, body, place), request.receive)
            return json_response(answer.whole(finals))
        outputs = await in_flight.run(_primed(answer, body, place), request.receive)
        frames = answer.frames(outputs.prompt_lengths)
        return EventStream(frames, outputs, in_flight, stream_format, server.config.sse_keep_alive_interval)


async def _finals(
    answer: AnswerWriter, body: GenerationRequest, place: QueueReservation
) -> list[RequestOutput]:
    outputs = await _started(answer, body, place)
    return await outputs.final()


async def _primed(answer: AnswerWriter, body: GenerationRequest, place: QueueReservation) -> Outputs:
    """Return outputs with the first one fetched if it comes soon, so that the response's head is not delayed."""
    outputs = await _started(answer, body, place)
    await outputs.prime(HEAD_AFTER_S)
    return outputs


async def _started(answer: AnswerWriter, body: GenerationRequest, place: QueueReservation) -> Outputs:
    """Render and tokenize; this time counts toward the request's timeout.

    Raises:
        DeadlineError: the timeout is exceeded.
    """
    try:
        async with asyncio.timeout(body.time_left()):
            return await answer.start(place)
    except TimeoutError:
        raise DeadlineError("the request timed out before its prompt was ready") from None
