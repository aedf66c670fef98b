# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions and /v1/audio/translations

Invariant: a sound's file is removed when its request ends, however it ends; a client that disconnects, also during its
upload, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from quire.adapters import adapter_terms
from quire.entrypoints.openai.connection import KeepAlive
from quire.entrypoints.openai.errors import frame_of, json_response, own_id_of, request_id_of
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature
from quire.entrypoints.openai.in_flight import ClientDisconnectedError
from quire.entrypoints.openai.openapi.operation import Operation, data_events, describe
from quire.entrypoints.openai.parsing import checked, note_size
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.streaming import COMMENT, DONE, frame
from quire.entrypoints.openai.tenant import READ_HEADERS, apply_request_settings, tenant_of
from quire.errors import UnavailableError, ValidationError
from quire.speech import formats
from quire.speech.desk import desk_of
from quire.speech.protocol import TranscriptionRequest, read_form
from quire.speech.realtime_route import add_realtime
from quire.speech.requests import SpeechOptions
from quire.speech.transcript import Transcription
from quire.speech.vocabulary import hears

router = APIRouter()
TEXTS = {"text/plain": {"type": "string"}, "text/vtt": {"type": "string"}}
OPERATION = Operation(
    body=(TranscriptionRequest,),
    is_form=True,
    reply=formats.TranscriptReply | formats.VerboseReply,
    stream=data_events(formats.TranscriptDelta | formats.TranscriptDone | formats.TranscriptChunk),
    other=TEXTS,
    errors=(404, 504),
    headers=READ_HEADERS,
)


@router.post("/v1/audio/transcriptions")
@describe(OPERATION)
async def transcribe(request: Request) -> Response:
    """Transcribe a sound."""
    return await _respond(request, "transcribe")


@router.post("/v1/audio/translations")
@describe(OPERATION)
async def translate(request: Request) -> Response:
    """Transcribe a sound in English, whatever its language."""
    return await _respond(request, "translate")


@dataclass(frozen=True)
class _Work:
    """A checked request with its sound's file."""

    request: Request
    body: TranscriptionRequest
    options: SpeechOptions
    model: str
    source: Path

    @property
    def server(self) -> ServerState:
        return server_of(self.request)

    def run(self) -> AsyncGenerator[Transcription, None]:
        """Return the transcripts so far."""
        body = self.body
        terms: dict[str, Any] = {
            "priority": body.priority,
            "tenant": tenant_of(self.request, body),
            **adapter_terms(self.server.adapters.get(self.model)),
            "timeout_s": body.time_left(),
            "trace_headers": body.trace_headers,
            "data_parallel_rank": body.replica,
        }
        request_id = f"transcription-{own_id_of(self.request.scope)}"
        return desk_of(self.request.app).transcribe(self.source, self.options, request_id, **terms)

    async def whole(self) -> Transcription:
        """Return the transcript."""
        async with asyncio.timeout(self.body.time_left()), aclosing(self.run()) as states:
            return [state async for state in states][-1]


async def _respond(request: Request, task: str) -> Response:
    _check_origin(request)
    desk = desk_of(request.app)
    source = desk.store.new_path("upload")
    with _removed_on_error(source):
        raw = await _uploaded(request, source)
        note_size(request, sum(len(str(value)) for value in raw.values()))
        body = await checked(request, raw, TranscriptionRequest)
        model = server_of(request).check_model(body.model)
        apply_request_settings(request, body)
        work = _Work(request, body, desk.checked(body.options(task)), model, source)
        if body.stream:
            return SpeechStream(work)
        found = await server_of(request).in_flight.run(work.whole(), request.receive)
        source.unlink(missing_ok=True)
        return _reply(found, body)


def _check_origin(request: Request) -> None:
    """Reject forms from pages of other sites, which browsers send without asking the server first."""
    origin, allowed = request.headers.get("origin"), server_of(request).config.allowed_origins
    is_own = origin is None or request.headers.get("sec-fetch-site") == "same-origin"
    if not is_own and origin not in allowed and "*" not in allowed:
        raise ValidationError(f"forms from pages of {origin:.100} are not accepted (--allowed-origins)")


@contextmanager
def _removed_on_error(source: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        source.unlink(missing_ok=True)
        raise


async def _uploaded(request: Request, source: Path) -> dict[str, Any]:
    try:
        return await read_form(request, source)
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    except OSError as error:
        raise UnavailableError(f"the sound cannot be stored: {error.strerror}") from None


def _reply(found: Transcription, body: TranscriptionRequest) -> Response:
    ignored = body.notes.ignored or UNSET
    match body.response_format:
        case "text":
            return PlainTextResponse(formats.plain(found))
        case "srt":
            return PlainTextResponse(formats.srt(found, words=body.wants_words))
        case "vtt":
            return PlainTextResponse(formats.vtt(found, words=body.wants_words), media_type="text/vtt")
        case "verbose_json":
            reply = formats.verbose(found, segments=body.wants_segments, words=body.wants_words)
            reply.ignored = ignored
            return json_response(reply)
    return json_response(
        formats.TranscriptReply(text=found.text, usage=formats.usage_seconds(found), ignored=ignored)
    )


class SpeechStream(Response):
    """Response that sends a transcript as it grows."""

    media_type = "text/event-stream"

    def __init__(self, work: _Work) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._work.server
        interval = server.config.sse_keep_alive_interval
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with KeepAlive(send, COMMENT, interval) as keep_alive:
                await server.in_flight.run(self._send_events(send, keep_alive), receive)
        except ClientDisconnectedError:
            return
        except Exception as error:  # the response has begun, so the error must be an event
            await _send(send, frame_of(error, request_id_of(scope)))
        finally:
            self._work.source.unlink(missing_ok=True)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_events(self, send: Send, keep_alive: KeepAlive) -> None:
        events = _VllmEvents(self._work) if self._work.body.stream_format == "vllm" else _Events()
        last: Transcription | None = None
        async with aclosing(self._work.run()) as states:
            async for last in states:
                if data := events.growth(last.text):
                    keep_alive.count_sent()
                    await _send(send, data)
        assert last is not None, "a sound has a window"
        await _send(send, events.closing(last))


class _Events:
    """Events of OpenAI's API."""

    def __init__(self) -> None:
        self._text = ""

    def growth(self, text: str) -> bytes:
        """Return the event of what the text has more than before."""
        added, self._text = text.removeprefix(self._text), text
        return self._event(added) if added else b""

    def closing(self, found: Transcription) -> bytes:
        """Return the last event."""
        return frame(formats.TranscriptDone(text=found.text, usage=formats.usage_tokens(found)))

    def _event(self, added: str) -> bytes:
        return frame(formats.TranscriptDelta(delta=added))


class _VllmEvents(_Events):
    """Chunks in vLLM's form, with one finish reason at the end."""

    def __init__(self, work: _Work) -> None:
        super().__init__()
        self._head: dict[str, Any] = {
            "id": f"trsc-{own_id_of(work.request.scope)}",
            "object": "translation.chunk" if work.options.task == "translate" else "transcription.chunk",
            "created": int(time.time()),
            "model": work.model,
        }

    def closing(self, found: Transcription) -> bytes:
        return self._chunk("", "stop")

    def _event(self, added: str) -> bytes:
        return self._chunk(added, None)

    def _chunk(self, added: str, finish: str | None) -> bytes:
        choice = formats.ChunkChoice(formats.ChunkDelta(added), finish)
        return frame(formats.TranscriptChunk(choices=[choice], **self._head))


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


FEATURE = ServerFeature(families=(EndpointFamily(router, hears),), install=add_realtime)
