# SPDX-License-Identifier: Apache-2.0
"""Whichever way a stream's chunks are made and written, the client gets the same bytes."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.openai import streaming
from quire.entrypoints.openai.chat_completions import ChatAnswerWriter
from quire.entrypoints.openai.connection import ResponseBody
from quire.entrypoints.openai.protocol.responses import ChatChunk, ChatChunkChoice, ChatDelta
from quire.entrypoints.openai.streaming import TextFrame, frame
from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for, live_server

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXTS)
def test_a_frame_of_a_text_is_that_of_its_chunk(text: str) -> None:
    def chunk(content: str) -> msgspec.Struct:
        choice = ChatChunkChoice(index=3, delta=ChatDelta(content=content))
        return ChatChunk(id="a", created=1, model='a "model"', choices=[choice], usage=None)

    assert TextFrame(chunk(TextFrame.MARK)).with_text(text) == frame(chunk(text))


@given(st.lists(st.binary()), st.sampled_from([b"1.0", b"1.1"]))
def test_pieces_of_a_body_are_framed_as_h11_frames_them(pieces: list[bytes], version: bytes) -> None:
    theirs, written = answering(version), list[bytes]()
    cycle: Any = SimpleNamespace(
        conn=answering(version),
        transport=SimpleNamespace(write=written.append),
        flow=SimpleNamespace(write_paused=False),
        disconnected=False,
    )
    body = ResponseBody(cycle)
    for piece in pieces:
        assert body.is_open
        body.write(piece)
    assert written == [data for piece in pieces if (data := theirs.send(h11.Data(data=piece)))]
    assert cycle.conn.send(h11.EndOfMessage()) == theirs.send(h11.EndOfMessage())
    assert not body.is_open


def answering(version: bytes) -> h11.Connection:
    """A server's connection whose response has begun."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[]))
    return connection


THINKS = FakeTokenizer(TEMPLATE + "{# <think> </think> #}")
REPLIES = {
    "plain": 'Ein "Wort" \u00fc\n',
    "reasoning": "<think>\nSo, f.\n</think>\n\nNo <b> it is.",
    "calls": '<think>f?</think>Look: <tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>\nDone.',
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["ep"]},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"include_reasoning": False},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
async def test_streams_are_the_same_bytes_either_way(
    fields: dict[str, Any], reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}

    async def streamed() -> str:
        engine = FakeEngine(THINKS)
        engine.reply = lambda prompt, index: REPLIES[reply] + str(index)
        async with client_for(engine) as client:
            text = (await client.post("/v1/chat/completions", json=body)).text
        return re.sub(r'"(id|created|timings)":("[^"]*"|\d+|\{[^}]*\})', "", text)

    short = await streamed()
    assert short.count("data: ") > 3
    with monkeypatch.context() as patch:
        patch.setattr(ChatAnswerWriter, "choice", lambda *_: None)
        assert await streamed() == short


MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat-logprobs": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "n": 2}),
    "chat-tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    "completions": ("/v1/completions", {"prompt": "hi", "logprobs": 1, "max_tokens": 200}),
    "completions-of-two": ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 200}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}),
    "ollama": ("/api/chat", {"messages": MESSAGES}),
}
CHANGES = re.compile(
    r'"(id|item_id|created|created_at|completed_at)":("[^"]*"|[\d.]+)|"timings":\{[^}]*\}|"\w+_duration":\d+|(?:chatcmpl|resp|msg)[-_]\w+'
)


async def test_streams_are_the_same_bytes_however_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, past ASGI; or by the stream's task, which is also who begins and ends it."""
    written: list[bytes] = []
    write = ResponseBody.write

    def watched(self: ResponseBody, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(ResponseBody, "write", watched)
    engine = FakeEngine()
    engine.reply = lambda prompt, index: 'Ein "Wort" \u00fc\n' * 5

    async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
        text = (await client.post(path, json={"model": "fake-model", **body, "stream": True})).text
        return sorted(CHANGES.sub("", text).splitlines())  # choices come in any order

    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        for name, (path, body) in STREAMS.items():
            written.clear()
            at_once = await streamed(client, path, body)
            is_one = name != "completions-of-two"
            assert (len(written) > 40) == is_one, name
            with monkeypatch.context() as patch:
                patch.setattr(streaming, "body_of_response", lambda _: None)
                assert await streamed(client, path, body) == at_once, name
            assert len(at_once) > 40, name


PINGS = {"messages": b'event: ping\ndata: {"type": "ping"}\n\n', "ollama": b""}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("hold_after", [0, 5], ids=["before", "within"])
async def test_silent_stream_has_head_and_pings_and_same_bytes(
    name: str, hold_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held before its first token, or in the middle, an answer has its head, signs of life, and then its bytes."""
    monkeypatch.setattr(streaming, "HEAD_AFTER_S", 0.001)
    (path, body), ping = STREAMS[name], PINGS.get(name, b":\n\n")
    engine = FakeEngine()
    options = {"sse_keep_alive_interval": 0.002}
    async with live_server(engine, **options) as server, httpx.AsyncClient(base_url=server.url) as client:
        request = {"model": "fake-model", **body, "stream": True}
        plain = (await client.post(path, json=request)).content
        engine.hold_after = hold_after
        received = b""
        async with client.stream("POST", path, json=request) as response:
            assert response.status_code == 200
            if not ping:
                engine.died.set()
            async for data in response.aiter_raw():
                received += data
                if ping and received.count(ping) > 3:
                    engine.died.set()  # nobody died: what was held goes on
    assert without_changes(received, ping) == without_changes(plain, ping)


def without_changes(body: bytes, ping: bytes) -> list[str]:
    """Lines of a stream, sorted since choices come in any order, without pings and what differs between two runs."""
    text = (body.replace(ping, b"") if ping else body).decode()
    return sorted(CHANGES.sub("", text).splitlines())


async def test_failure_behind_the_head_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEAD_AFTER_S", 0.001)
    engine = FakeEngine()
    engine.hold_after = 0
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        request = {"messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200
            engine.die()
            body = (await response.aread()).decode()
    assert body.count('"error"') == 1
    assert body.endswith("data: [DONE]\n\n")
    assert not engine.running


async def test_client_that_leaves_a_silent_stream_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEAD_AFTER_S", 0.001)
    engine = FakeEngine()
    engine.hold_after = 0
    async with live_server(engine, sse_keep_alive_interval=0.002) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            request = {"messages": MESSAGES, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=request) as response:
                await anext(response.aiter_raw())
                assert len(engine.running) == 1
        while engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert len(engine.closed) == 1
