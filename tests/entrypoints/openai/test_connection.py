# SPDX-License-Identifier: Apache-2.0
"""Slow, silent and absent clients on real sockets: each is cut off, its request ends, and others are served."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.entrypoints.openai import connection
from quire.entrypoints.openai.connection import FIRST_BYTES, max_connections
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import LiveServer, live_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def connect(server: LiveServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.listener.getsockname()[1])


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes. A server that closes before it has read everything resets the connection, after its answer."""
    answer = b""
    async with asyncio.timeout(300):
        try:
            while block := await reader.read(1 << 16):
                answer += block
        except ConnectionResetError:
            pass
    return answer


async def is_served(server: LiveServer) -> bool:
    async with httpx.AsyncClient(base_url=server.url) as client:
        return (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


@pytest.mark.item(35)
async def test_incomplete_request_ends_with_408() -> None:
    sent = [
        b"",
        b"GET / HT",
        HEAD,
        HEAD + b"content-length: 100\r\n\r\n",
        HEAD + b"content-length: 9\r\n\r\n{",
    ]
    async with live_server(FakeEngine(), read_timeout=0.3) as server:
        clients = [await connect(server) for _ in sent]
        for data, (_, writer) in zip(sent, clients, strict=True):
            writer.write(data)
        answers = await asyncio.gather(*(until_closed(reader) for reader, _ in clients))
        for _, writer in clients:
            writer.close()
        assert await is_served(server)
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"--read-timeout" in answer


async def test_408_has_the_shape_of_its_api() -> None:
    async with live_server(FakeEngine(), read_timeout=0.3) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        head, _, body = (await until_closed(reader)).partition(b"\r\n\r\n")
        writer.close()
    error = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])  # it comes in chunks
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert f"x-request-id: {error['request_id']}".encode() in head


@pytest.mark.item(35)
async def test_bytes_now_and_then_do_not_keep_a_connection() -> None:
    async with live_server(FakeEngine(), read_timeout=0.5) as server:
        reader, writer = await connect(server)
        writer.write(HEAD)
        ended = asyncio.create_task(until_closed(reader))
        for _ in range(200):
            if ended.done():
                break
            writer.write(b"x-a: b\r\n")
            await asyncio.sleep(0.05)
        assert b" 408 " in await ended
        writer.close()


async def test_an_answer_that_takes_long_is_not_cut() -> None:
    engine = FakeEngine()
    engine.hold_after = 2
    async with live_server(engine, read_timeout=0.2, write_timeout=0.2) as server:
        reader, writer = await connect(server)
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"data: ")
        await asyncio.sleep(0.6)
        assert engine.running, "it goes on"
        writer.close()


@pytest.mark.item(34)
async def test_a_client_that_does_not_read_is_cut_and_its_request_ends() -> None:
    engine = FakeEngine(max_model_len=2**20, max_num_batched_tokens=2**20)
    engine.reply = lambda prompt, index: "x" * 4_000
    async with live_server(engine, write_timeout=0.3) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.create_connection(("127.0.0.1", server.listener.getsockname()[1]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 4_000, "logprobs": 3}).encode()
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(300):
            while not engine.closed:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not engine.running
        engine.reply = lambda prompt, index: "x"
        assert await is_served(server)
        client.close()


@pytest.mark.item(34)
async def test_a_client_that_reads_slowly_gets_everything() -> None:
    engine = FakeEngine(max_model_len=2**20, max_num_batched_tokens=2**20)
    engine.reply = lambda prompt, index: "x" * 2_000
    async with live_server(engine, write_timeout=3.0) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader, writer = await connect(server)
        body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 5_000, "logprobs": 3}).encode()
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while piece := await reader.read(2**15):
            received += piece
            await asyncio.sleep(0.03)
        writer.close()
    assert b"data: [DONE]" in received


@pytest.mark.item(35)
async def test_connections_beyond_the_limit_refused_others_continue() -> None:
    async with live_server(FakeEngine(), max_connections=3) as server:
        idle: list[Any] = [await connect(server) for _ in range(3)]
        silent, writer = await connect(server)
        assert b" 408 " in await until_closed(silent), "who is one too many may not be silent for long"
        writer.close()
        async with httpx.AsyncClient(base_url=server.url) as client:
            refused = await client.get("/health")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "3 connections" in refused.json()["error"]["message"]
            assert refused.headers["connection"] == "close"
            idle[0][1].close()
            await idle[0][1].wait_closed()
            for _ in range(200):
                if (served := await client.get("/health")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
            assert served.status_code == 200
        for _, writer in idle:
            writer.close()


def test_the_limit_leaves_files_for_the_rest() -> None:
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 8 <= max_connections(ServerConfig()) < max(num_files, 9)
    assert max_connections(ServerConfig(max_connections=5)) == 5


BODY = json.dumps({"prompt": "hi", "max_tokens": 50}).encode()
STREAMED = json.dumps({"prompt": "hi", "max_tokens": 50, "stream": True}).encode()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("body", [BODY, STREAMED, BODY + HEAD], ids=["whole", "stream", "more"])
async def test_a_client_that_sends_no_more_gets_its_answer(body: bytes) -> None:
    """After a time in which the server has asked whether it is there; what is no whole request gets none."""
    engine = FakeEngine()
    engine.hold_after = 0
    length = len(STREAMED if body is STREAMED else BODY)
    async with live_server(engine) as server:
        reader, writer = await connect(server)
        writer.write(HEAD + f"content-length: {length}\r\n\r\n".encode() + body)
        writer.write_eof()
        await until(lambda: engine.running)
        async with asyncio.timeout(300):
            for _ in range(3):
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        engine.hold_after = None
        engine.died.set()
        answer = (await until_closed(reader)).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert (b"[DONE]" if body is STREAMED else b"Reply 0!") in answer


@pytest.mark.parametrize("num_probes", [0, 1, 4, len(FIRST_BYTES)])
@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "stream"])
async def test_one_of_an_older_http_sees_but_its_answer(
    body: bytes, num_probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun before it is known, and each byte of it comes once."""
    monkeypatch.setattr(connection, "PROBE_S", 1e-4)
    engine = FakeEngine()
    engine.hold_after = 0
    async with live_server(engine) as server:
        reader, writer = await connect(server)
        head = HEAD.replace(b"1.1", b"1.0")
        writer.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        writer.write_eof()
        await until(lambda: engine.running)
        async with asyncio.timeout(300):
            begun = await reader.readexactly(num_probes)
        engine.hold_after = None
        engine.died.set()
        answer = begun + await until_closed(reader)
        writer.close()
    assert FIRST_BYTES.startswith(begun)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(FIRST_BYTES) == 1
    assert (
        answer.endswith(b"[DONE]\n\n") if body is STREAMED else json.loads(answer.partition(b"\r\n\r\n")[2])
    )


@pytest.mark.item(32)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "stream"])
async def test_client_disconnect_before_the_answer_ends_its_request(body: bytes, version: bytes) -> None:
    engine = FakeEngine()
    engine.hold_after = 0
    async with live_server(engine) as server:
        _, writer = await connect(server)
        head = HEAD.replace(b"1.1", version)
        writer.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: engine.running)
        writer.close()
        await until(lambda: not engine.running)
        await until(lambda: not len(server.app.state.server.in_flight))
        assert len(engine.closed) == 1
