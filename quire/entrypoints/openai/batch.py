"""Offline batch runner: sends each request of a file in OpenAI's batch format to the server's own application.

Invariant: every non-blank input line has one output line, in input order, even if the request is invalid, unless an
earlier run answered it. At most `window` lines are in memory at a time. Of lines with the same custom_id only the first
is a request.
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
from quire.entrypoints.openai.keys import Keyring
from quire.entrypoints.openai.parsing import parse_json
from quire.errors import ClientError, PayloadTooLargeError, QuireError, ValidationError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
    "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
RETRY_S = 0.5  # Seconds between two attempts of a line that the server rejects because it is full.
FULL = (429, 503)
Call = tuple[str, bytes]  # URL and body of a request.


@dataclass
class LineCounts:
    """Line counts of a run: answered, answered with an error, and skipped because an earlier run answered them."""

    num_lines: int = 0
    num_failed: int = 0
    num_skipped: int = 0


class OutputLine(msgspec.Struct):
    """Output line for one input line; exactly one of `response` and `error` is null."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, str] | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response["status_code"] != 200


class ResumeFilter:
    """Filter that skips lines answered in earlier runs and detects repeated custom_ids.

    Args:
        answered: number of answers from earlier runs, by custom_id.
    """

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._seen: set[bytes] = set()

    def is_answered(self, custom_id: str | None) -> bool:
        """Return whether an earlier run answered the next line with this id."""
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
) -> LineCounts:
    """Load the model, answer all lines that are not answered yet, and shut down.

    Raises:
        QuireError: the model cannot be loaded, the engine failed, or an answer cannot be written. Answers before that
            line are written.
    """
    return asyncio.run(_run(config, lines, out, answered))


async def _run(config: EngineConfig, lines: BinaryIO, out: BinaryIO, answered: Answered | None) -> LineCounts:
    engine, server = AsyncLLM.start(config), ServerConfig()
    try:
        app = build_app(engine, server, keys=Keyring({}))  # not reachable from outside
        await engine.wait_ready()
        batch = Batch(app, server)
        window = 2 * engine.config.scheduler.max_num_seqs
        return await batch.run(lines, out, window=window, answered=answered)
    finally:
        await engine.shutdown()


class Batch:
    """In-process client of the application: sends lines like an HTTP client, without a socket."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._app = app
        self._engine = app.state.server.engine
        self._max_bytes = config.max_request_bytes
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]

    async def run(
        self, lines: BinaryIO, out: BinaryIO, *, window: int, answered: Answered | None = None
    ) -> LineCounts:
        """Answer up to `window` lines at a time, and write the answers in input order.

        Args:
            answered: number of lines answered by earlier runs, by custom_id; these are skipped.
        """
        counts, sorter = LineCounts(), ResumeFilter(answered or Answered())
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

    def _read(self, line: bytes | None, sorter: ResumeFilter) -> tuple[str | None, Call | ClientError] | None:
        """Return a line's custom_id and its request, or the error of the line; None if it is answered already."""
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
        """Return the answer to one line.

        Raises:
            QuireError: the engine has stopped.
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
        """Send one request to the ASGI application, as a client that never disconnects."""
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
    """Yield the non-blank lines; None for a line longer than `max_bytes`, whose rest is skipped."""
    while line := file.readline(max_bytes + 2):
        if len(line.rstrip(b"\r\n")) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield None
        elif line.strip():
            yield line


def _checked(request: dict[str, Any]) -> Call:
    """Return URL and body of a line.

    Raises:
        ValidationError: a field does not match the batch format.
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


def _write(out: BinaryIO, line: OutputLine, counts: LineCounts) -> None:
    """Write one output line.

    Raises:
        QuireError: the line cannot be written, for instance because the disk is full. A BrokenPipeError passes through.
    """
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
