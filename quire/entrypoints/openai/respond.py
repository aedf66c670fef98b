"""The one way from a request to its response, for all endpoint families that generate.

Invariant: the client's connection is watched from when its request has come in to the end, and a refusal comes
before a stream has begun, with its proper status. A request has its place in the queue before it costs anything, and
leaves it however it ends.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.queue_limits import Place
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.protocol.requests import GenerationRequest
from quire.entrypoints.openai.sampling import client_names
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.streaming import OPENAI_WIRE, EventStream, Frames, Wire
from quire.entrypoints.openai.tenant import apply_terms
from quire.errors import DeadlineError
from quire.outputs import RequestOutput

HEAD_AFTER_S = 1.0  # later errors come as events of the stream, with status 200


class Answer(Protocol):
    """How one family writes its answers."""

    @property
    def num_sequences(self) -> int:
        """What the request asks for, bounded by what any may ask for.

        Raises:
            ValidationError: it has no prompt of a form that can be counted.
        """
        ...

    async def start(self, place: Place) -> Outputs:
        """Check the request and hand it to the engine, where it has this place; nothing runs before the outputs are
        read."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The answer as one object, from the final output of each prompt."""
        ...

    def frames(self, prompt_lengths: list[int]) -> Frames:
        """Who writes the answer in pieces, as its outputs come."""
        ...


async def respond(
    request: Request, body: GenerationRequest, answer: Answer, wire: Wire = OPENAI_WIRE
) -> Response:
    """Generate, and answer whole or as a stream."""
    server = server_of(request)
    in_flight = server.in_flight
    apply_terms(request, body)
    with client_names(body), server.engine.reserve(answer.num_sequences) as place:
        if not body.stream:
            finals = await in_flight.run(_finals(answer, body, place), request.receive)
            return json_response(answer.whole(finals))
        outputs = await in_flight.run(_primed(answer, body, place), request.receive)
        frames = answer.frames(outputs.prompt_lengths)
        return EventStream(frames, outputs, in_flight, wire, server.config.sse_keep_alive_interval)


async def _finals(answer: Answer, body: GenerationRequest, place: Place) -> list[RequestOutput]:
    outputs = await _started(answer, body, place)
    return await outputs.final()


async def _primed(answer: Answer, body: GenerationRequest, place: Place) -> Outputs:
    """With the first output, if it comes soon; a client does not wait longer for the head of its answer."""
    outputs = await _started(answer, body, place)
    await outputs.prime(HEAD_AFTER_S)
    return outputs


async def _started(answer: Answer, body: GenerationRequest, place: Place) -> Outputs:
    """Render and tokenize, which is part of the request's time.

    Raises:
        DeadlineError: it takes longer.
    """
    try:
        async with asyncio.timeout(body.time_left()):
            return await answer.start(place)
    except TimeoutError:
        raise DeadlineError("the request's time was over before its prompt was ready") from None
