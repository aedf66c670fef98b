# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 client for OpenAI-compatible servers, and a printer of streamed answers.

Used by `chat`, `complete` and `bench serve`; one connection per request. A response may be chunked, have a length, or
end with the connection (RFC 9112, section 6.3). Invariant: a connection is closed when its response ends, however it
ends.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import click

from quire.errors import ClientError, ConfigError, EngineError, UnavailableError
from quire.version import __version__

LINE_LIMIT = 2**22  # Longest header or event line in bytes; events with logprobs of many tokens are long.
Event = dict[str, Any]


def enable_line_editing() -> None:
    """Give `input` a history and the editing of lines on a terminal, where this Python has readline."""
    if (
        sys.stdin is not None and sys.stdin.isatty()
    ):  # elsewhere readline may write a control sequence to stdout
        with suppress(ImportError):
            import readline  # noqa: F401


class AnswerPrinter:
    """Prints one streamed answer, reasoning dimmed; click omits dimming outside of terminals."""

    def __init__(self) -> None:
        self._thinks = False
        self._last = ""

    def thought(self, text: str) -> None:
        if text:
            self._thinks = True
            self._echo(text, dim=True)

    def said(self, text: str) -> None:
        if text and self._thinks:
            self._thinks = False
            self._echo("\n\n" if not self._last.endswith("\n") else "\n")
        self._echo(text)

    def end(self) -> None:
        click.echo()

    def _echo(self, text: str, *, dim: bool = False) -> None:
        self._last = text or self._last
        click.echo(click.style(text, dim=True) if dim else text, nl=False)


class ServerClient:
    """Client of one server; paths are appended to `base_url`, such as http://localhost:8000/v1.

    Raises (all methods):
        UnavailableError: the connection failed, or broke before the response ended.
        ClientError: the server rejected the request (4xx); the message is the server's.
        EngineError: the server failed (5xx), or sent an invalid response.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--url must be like http://localhost:8000/v1, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s

    async def get(self, path: str) -> Event:
        """Return the JSON object at `path`."""
        async with self._exchange("GET", path, None) as body:
            return _json(await _joined(body))

    async def post(self, path: str, request: Mapping[str, Any]) -> Event:
        """Return the JSON object that answers `request`."""
        async with self._exchange("POST", path, request) as body:
            return _json(await _joined(body))

    async def stream(self, path: str, request: Mapping[str, Any]) -> AsyncGenerator[Event]:
        """Yield the server-sent events that answer `request`, until `[DONE]`."""
        async with self._exchange("POST", path, request) as body:
            async for data in event_data(body):
                if data == "[DONE]":
                    return
                event = _json(data.encode())
                if "error" in event:
                    raise EngineError(_error_message(event))
                yield event
        raise UnavailableError("the server ended the stream without [DONE]")

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, request: Mapping[str, Any] | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and yield the body of its 200 response."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._ssl, limit=LINE_LIMIT
                )
                try:
                    writer.write(self._head_and_body(method, path, request))
                    await writer.drain()
                    status, headers = await read_head(reader)
                    async with aclosing(read_body(reader, headers)) as body:
                        if status != 200:
                            raise _refusal(status, await _joined(body))
                        yield body
                finally:
                    writer.close()
        except TimeoutError as error:
            raise UnavailableError(
                f"{self.base_url}: the answer did not end within {self._timeout_s:g} s"
            ) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            message = f"cannot connect to {self.base_url}: {error}; is `quire serve` running?"
            raise UnavailableError(message) from error

    def _head_and_body(self, method: str, path: str, request: Mapping[str, Any] | None) -> bytes:
        body = b"" if request is None else json.dumps(request).encode()
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"Host: {self._authority}",
            f"User-Agent: quire/{__version__}",
            "Accept: application/json, text/event-stream",
            "Connection: close",
        ]
        if request is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


def carries_tokens(event: Event) -> bool:
    """Return whether a streamed chunk carries tokens, even without text; a chat's first chunk carries only the role."""
    choices = event.get("choices", [])
    return any("text" in choice or _delta_has_tokens(choice.get("delta", {})) for choice in choices)


def _delta_has_tokens(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "tool_calls", "reasoning", "reasoning_content")) or (
        "content" in delta and "role" not in delta
    )


async def event_data(body: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the `data` fields of a server-sent event stream split anywhere; other fields are skipped."""
    pending = b""
    async for piece in body:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, by name in lower case, of a response.

    Raises:
        EngineError: it is no HTTP/1.x.
    """
    status_line = (await reader.readline()).split(maxsplit=2)
    if len(status_line) < 2 or not status_line[0].startswith(b"HTTP/1.") or not status_line[1].isdigit():
        raise EngineError("the server's response is not HTTP/1.x")
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status_line[1]), headers


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes]:
    """Yield the pieces of a response's body.

    Raises:
        asyncio.IncompleteReadError: the connection ended before the body. EngineError: it is malformed.
    """
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := _chunk_size(await reader.readline()):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(2**16):
            yield piece


def _chunk_size(line: bytes) -> int:
    if not line:
        raise asyncio.IncompleteReadError(line, None)
    try:
        return int(line.split(b";")[0], 16)
    except ValueError as error:
        raise EngineError(f"the server sent no chunk size: {line[:80]!r}") from error


async def _joined(body: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in body])


def _json(content: bytes) -> Event:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise EngineError(f"the server's response is not JSON: {content[:80]!r}") from error
    if not isinstance(parsed, dict):
        raise EngineError(f"the server's response is not a JSON object: {content[:80]!r}")
    return parsed


def _refusal(status: int, content: bytes) -> ClientError | EngineError:
    try:
        message = _error_message(_json(content))
    except EngineError:
        message = content[:200].decode(errors="replace") or "no reason given"
    kind = ClientError if status < 500 else EngineError
    return kind(f"the server answered {status}: {message}")


def _error_message(answer: Event) -> str:
    error = answer.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or answer)
