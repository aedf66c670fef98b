"""Answers a file of requests, in OpenAI's batch format, through the same application that the server runs.

Invariant: every line of the input that is not blank has one line in the output, in the same order, whatever is wrong
with it, unless its answer is there from an earlier run; at most `window` lines are in memory at a time. Of lines with
the same custom_id only the first is a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
from fastapi import FastAPI
from starlette.types import Message

from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.batch_output import ID_PREFIX, Answered
from quire.entrypoints.openai.json_body import parse_json
from quire.entrypoints.openai.keys import Keyring
from quire.errors import ClientError, PayloadTooLargeError, QuireError, ValidationError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
    "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
RETRY_S = 0.5
"""Between two attempts of a line that the server is too full for."""
FULL = (429, 503)
Call = tuple[str, bytes]
"""URL and body of a request."""


@dataclass
class Counts:
    """How many lines were answered, how many of them with an error, and how many had been answered before."""

    num_lines: int = 0
    num_failed: int = 0
    num_skipped: int = 0


class OutputLine(msgspec.Struct):
    """What is written for a line; one of `response` and `error` is null."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, str] | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response["status_code"] != 200


class Sorter:
    """Tells the lines that are still to be answered from those that were, and repeated custom_ids from first ones.

    Args:
        answered: how many answers there are from earlier runs, by custom_id.
    """

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._seen: set[bytes] = set()

    def is_answered(self, custom_id: str | None) -> bool:
        """Return whether the answer to the next line with this id is there."""
        is_there = self._answered[custom_id] > 0
        self._answered[custom_id] -= is_there
        if is_there and custom_id is not None:
            self._seen.add(_digest(custom_id))
        return is_there

    def check_first(self, custom_id: str) -> None:
        """Raise ValidationError if an earlier line has this id."""
        digest = _digest(custom_id)
        if digest in self._seen:
            raise ValidationError(
                f"custom_id {custom_id!r:.80} is that of an earlier line; each line needs one of its own",
                param="custom_id",
            )
        self._seen.add(digest)


def _digest(custom_id: str) -> bytes:
    return hashlib.sha256(custom_id.encode(errors="surrogatepass")).digest()[:16]


def run_file(
    config: EngineConfig, lines: BinaryIO, out: BinaryIO, answered: Answered | None = None
) -> Counts:
    """Load the model, answer all lines that are not answered, and end.

    Raises:
        QuireError: the model cannot be loaded, the engine failed, or an answer cannot be written; the lines before that
            are.
    """
    return asyncio.run(_run(config, lines, out, answered))


async def _run(config: EngineConfig, lines: BinaryIO, out: BinaryIO, answered: Answered | None) -> Counts:
    engine, server = AsyncLLM.start(config), ServerConfig()
    try:
        app = build_app(engine, server, keys=Keyring({}))  # nobody else reaches it
        await engine.wait_ready()
        batch = Batch(app, server)
        window = 2 * engine.config.scheduler.max_num_seqs
        return await batch.run(lines, out, window=window, answered=answered)
    finally:
        await engine.shutdown()


class Batch:
    """Sends lines to an application, as a client would, but without a socket."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._app = app
        self._engine = app.state.server.engine
        self._max_bytes = config.max_request_bytes
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]

    async def run(
        self, lines: BinaryIO, out: BinaryIO, *, window: int, answered: Answered | None = None
    ) -> Counts:
        """Answer up to `window` lines at a time, and write each answer when its turn has come.

        Args:
            answered: how many lines were answered before, by custom_id; they are passed over.
        """
        counts, sorter = Counts(), Sorter(answered or Answered())
        pending: deque[asyncio.Task[OutputLine]] = deque()
        try:
            for line in bounded_lines(lines, self._max_bytes):
                read = self._read(line, sorter)
                if read is None:
                    counts.num_skipped += 1
                    continue
                pending.append(asyncio.create_task(self.answer(*read)))
                if len(pending) >= window:
                    _write(out, await pending[0], counts)
                    pending.popleft()
            while pending:
                _write(out, await pending[0], counts)
                pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return counts

    def _read(self, line: bytes | None, sorter: Sorter) -> tuple[str | None, Call | ClientError] | None:
        """Return the custom_id of a line and what it asks for, or what is wrong with it; None: it is answered."""
        custom_id: str | None = None
        asked: Call | ClientError
        try:
            if line is None:
                raise PayloadTooLargeError(f"the line is longer than {self._max_bytes} bytes")
            request = parse_json(line)
            given = request.get("custom_id")
            custom_id = given if isinstance(given, str) else None
            asked = _checked(request)
        except ClientError as error:
            asked = error
        if sorter.is_answered(custom_id):
            return None
        try:
            if custom_id is not None:
                sorter.check_first(custom_id)
        except ValidationError as error:
            asked = error
        return custom_id, asked

    async def answer(self, custom_id: str | None, asked: Call | ClientError) -> OutputLine:
        """The answer to one line.

        Raises:
            QuireError: the engine has ended.
        """
        answer = OutputLine(f"{ID_PREFIX}{secrets.token_hex(12)}", custom_id, None, None)
        if isinstance(asked, ClientError):
            answer.error = {"code": asked.type, "message": str(asked)}
        else:
            answer.response = await self._post(*asked)
        return answer

    async def _post(self, url: str, body: bytes) -> dict[str, Any]:
        while True:
            response = await self._call(url, body)
            await self._engine.check_health()
            if response["status_code"] not in FULL:
                return response
            await asyncio.sleep(RETRY_S)

    async def _call(self, url: str, body: bytes) -> dict[str, Any]:
        """One request, as an HTTP server hands it to an application, from a client that never goes away."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, request_id, pieces = 500, "", list[bytes]()

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()
            return unread.pop()

        async def send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
            pieces.append(message.get("body", b""))

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*self._headers, (b"content-length", str(len(body)).encode())],
            "state": {},
        }
        await self._app(scope, receive, send)
        return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(b"".join(pieces))}


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """The lines that are not blank; None for one that is longer than `max_bytes`, of which the rest is skipped."""
    while line := file.readline(max_bytes + 2):
        if len(line.rstrip(b"\r\n")) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield None
        elif line.strip():
            yield line


def _checked(request: dict[str, Any]) -> Call:
    """URL and body of a line.

    Raises:
        ValidationError: one of its fields is not what the format says.
    """
    url, body = request.get("url"), request.get("body")
    if not isinstance(request.get("custom_id"), str):
        raise ValidationError("custom_id must be text", param="custom_id")
    if request.get("method", "POST") != "POST":
        raise ValidationError("method must be POST", param="method")
    if url not in URLS:
        raise ValidationError(f"url must be one of {', '.join(URLS)}", param="url")
    if not isinstance(body, dict):
        raise ValidationError("body must be a JSON object", param="body")
    if body.get("stream"):
        raise ValidationError("body.stream is not supported in a batch", param="body.stream")
    return str(url), json.dumps(body).encode()


def _write(out: BinaryIO, line: OutputLine, counts: Counts) -> None:
    """Raises QuireError: there is no room for the line; a BrokenPipeError passes."""
    text = msgspec.json.encode(line) + b"\n"
    try:
        while text:
            text = text[out.write(text) :]
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuireError(
            f"the answer to line {counts.num_lines + 1} cannot be written: {error.strerror}"
        ) from error
    counts.num_lines += 1
    counts.num_failed += line.failed
