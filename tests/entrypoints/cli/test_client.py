# SPDX-License-Identifier: Apache-2.0
"""The HTTP client against a scripted server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.entrypoints.cli.client import Event, ServerClient, carries_tokens, event_data
from quire.errors import ClientError, ConfigError, EngineError, UnavailableError
from tests.fixtures.fake_server import FakeServer, event_stream, json_answer
from tests.fixtures.folded import folded


def answered(response: bytes) -> Any:
    """Return the result of `get` for a raw HTTP response."""
    with FakeServer({"/v1/x": lambda _: response}) as server:
        return asyncio.run(ServerClient(f"{server.url}/v1").get("/x"))


def streamed(response: bytes) -> list[Event]:
    async def collect(url: str) -> list[Event]:
        return [event async for event in ServerClient(url).stream("/x", {})]

    with FakeServer({"/x": lambda _: response}) as server:
        return asyncio.run(collect(server.url))


def test_request_as_sent() -> None:
    with FakeServer({"/v1/x": lambda body: json_answer({"got": body})}) as server:
        client = ServerClient(f"{server.url}/v1/", api_key="secret")
        assert asyncio.run(client.post("/x", {"text": "héllo"})) == {"got": {"text": "héllo"}}
        headers = server.headers[0]
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Host"] == server.url.removeprefix("http://")
    assert headers["Content-Type"] == "application/json"
    assert headers["Connection"] == "close"


@pytest.mark.parametrize(
    "response",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}',
        b'HTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\n\r\n3\r\n{"a\r\n5;x=y\r\n": 1}\r\n0\r\n\r\n',
    ],
)
def test_ways_to_end_a_body(response: bytes) -> None:
    assert answered(response) == {"a": 1}


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_stream_is_the_same_however_it_is_cut(cut: int) -> None:
    events = [{"choices": [{"text": "ü"}]}, {"choices": [], "usage": {"n": 1}}]
    assert streamed(event_stream(events, cut=cut)) == events


@folded(
    ("event", "carries"),
    [
        ({"choices": [{"text": ""}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": ""}}]}, True),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [], "usage": {}}, False),
        ({}, False),
    ],
)
def test_which_chunks_bring_tokens(event: Event, carries: bool) -> None:
    assert carries_tokens(event) is carries


def test_comments_and_other_fields_are_skipped() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b": ping\r\n\r\nevent: x\r\ndata:a\r\n\r\nid: 3\nda"
        yield b"ta:  b \n\nretry: 1\n"

    async def collect() -> list[str]:
        return [data async for data in event_data(body())]

    assert asyncio.run(collect()) == ["a", "b"]


@folded(
    ("response", "error", "message"),
    [
        (json_answer({"error": {"message": "no such model"}}, 404), ClientError, "404: no such model"),
        (json_answer({"detail": 1}, 422), ClientError, "422"),
        (json_answer({"error": {"message": "broken"}}, 500), EngineError, "500: broken"),
        (b"HTTP/1.1 502 Bad\r\n\r\n<html>", EngineError, "502: <html>"),
        (b"HTTP/1.1 503 Bad\r\nContent-Length: 0\r\n\r\n", EngineError, "no reason given"),
        (b"SSH-2.0-OpenSSH\r\n", EngineError, "is not HTTP/1.x"),
        (b"", EngineError, "is not HTTP/1.x"),
        (b"HTTP/1.1 200 OK\r\n\r\nnot json", EngineError, "not JSON: b'not json'"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", EngineError, "not a JSON object"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{", UnavailableError, "cannot connect to"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{",
            UnavailableError,
            "cannot connect to",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", UnavailableError, "cannot connect to"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", EngineError, "no chunk size"),
    ],
)
def test_bad_answers(response: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        answered(response)


def test_error_within_a_stream() -> None:
    with pytest.raises(EngineError, match="core died"):
        streamed(event_stream([{"choices": []}, {"error": {"message": "core died"}}]))


def test_stream_without_end() -> None:
    with pytest.raises(UnavailableError, match=r"without \[DONE\]"):
        streamed(event_stream([{"choices": []}], done=False))


def test_client_without_a_server_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}.*is `quire serve` running"):
            asyncio.run(ServerClient(f"http://127.0.0.1:{port}").get("/x"))


def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(UnavailableError, match=r"0.05 s"):
            asyncio.run(client.get("/x"))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://"])
def test_bad_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--url must be like"):
        ServerClient(url)
