# SPDX-License-Identifier: Apache-2.0
"""A live server: ready line, draining, second signal, death of the engine, failed start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai import completions
from quire.entrypoints.openai.api_server import bind, run_server
from quire.entrypoints.openai.greeting import reaches_others
from quire.errors import ModelLoadError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import LiveServer, events, live_server
from tests.fixtures.folded import folded

BODY = {"prompt": "hi", "max_tokens": 50}
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


async def started(
    client: httpx.AsyncClient, engine: FakeEngine, num: int
) -> list[asyncio.Task[httpx.Response]]:
    """Answers that run until the engine's hold is lifted: one whole, the others streams that have begun."""
    whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
    requests = [client.build_request("POST", "/v1/completions", json={**BODY, "stream": True})] * (num - 1)
    streams = [await client.send(request, stream=True) for request in requests]
    async with asyncio.timeout(300):
        while len(engine.running) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return [whole, *(asyncio.create_task(_read(stream)) for stream in streams)]


async def _read(stream: httpx.Response) -> httpx.Response:
    await stream.aread()
    return stream


async def ready(server: LiveServer, client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(300):
        while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_serves_then_ends_with_code_0(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        server.lifecycle.on_signal()
        assert await server.code() == 0
    assert server.url in capsys.readouterr().out


@pytest.mark.item(60)
@pytest.mark.parametrize(
    ("host", "needs_key", "warns"),
    [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)],
)
async def test_open_server_without_a_key_is_warned_of(
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    host: str,
    needs_key: bool,
    warns: bool,
) -> None:
    async with live_server(engine, host=host, needs_key=needs_key) as server, asyncio.timeout(300):
        # Not until /health is 200, which it is a moment before the server says that it is there.
        while not capsys.readouterr().out:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        server.lifecycle.on_signal()
        assert await server.code() == 0
    assert (f"listening on {host} without a key" in caplog.text) == warns


@folded(
    ("host", "others"),
    [
        ("::", True),
        ("", True),
        ("192.168.1.2", True),
        ("::1", False),
        ("127.0.0.9", False),
        ("localhost", False),
    ],
)
def test_public_addresses_are_detected(host: str, others: bool) -> None:
    assert reaches_others(host) is others


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6, or one without IPv4")
def test_all_of_ipv6_is_ipv4_too() -> None:
    with bind("::", 0) as listener, bind("::1", 0) as local:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", local.getsockname()[1]))


@pytest.mark.item(48)
async def test_drain_lets_requests_finish(engine: FakeEngine) -> None:
    engine.hold_after = 3
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        tasks = await started(client, engine, 5)
        server.lifecycle.on_signal()
        await asyncio.sleep(0.02)
        for path in ("/health", "/v1/models"):
            refused = await client.get(path)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
        assert (await client.get("/livez")).status_code == 200
        engine.hold_after = None
        engine.died.set()
        assert await server.code() == 0
        whole, *streams = [await task for task in tasks]
        assert whole.json()["choices"][0]["text"] == "Reply 0!"
        for response in streams:
            *chunks, done = events(response.text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Reply 0!"
            assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


@pytest.mark.item(48)
@pytest.mark.parametrize("patience", [0.05, 60.0])
async def test_end_of_patience_or_second_signal_cancels(engine: FakeEngine, patience: float) -> None:
    engine.hold_after = 3
    async with (
        live_server(engine, shutdown_timeout=patience) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        await ready(server, client)
        tasks = await started(client, engine, 4)
        server.lifecycle.on_signal()
        if patience > 1:
            await asyncio.sleep(0.02)
            server.lifecycle.on_signal()
        assert await server.code() == 0
        whole, *streams = [await task for task in tasks]
        assert whole.status_code == 503
        for response in streams:
            *chunks, error, done = events(response.text)
            assert (error["error"]["code"], done) == (503, "[DONE]")
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert not engine.running


@pytest.mark.item(48)
async def test_a_stream_that_waits_for_its_first_token_drains(engine: FakeEngine) -> None:
    """It is the only one, and between its first token and the next nothing of it is running."""
    engine.hold_after = 0
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        streaming = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
        await until(lambda: engine.running)
        server.lifecycle.on_signal()
        await until(lambda: server.app.state.server.draining)
        engine.hold_after = None
        engine.died.set()
        *chunks, done = events((await streaming).text)
        assert await server.code() == 0
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Reply 0!"
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Early:
    """Requests of which nothing has come to the engine: one sends its body, one waits for its prompt's tokens."""

    def __init__(
        self, server: LiveServer, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.go_on, self._server = asyncio.Event(), server
        tokenize = completions.completion_prompts

        async def later(*args: Any) -> Any:
            await self.go_on.wait()
            return await tokenize(*args)

        monkeypatch.setattr(completions, "completion_prompts", later)
        post = client.post("/v1/completions", json=BODY)
        self.tasks = [asyncio.create_task(post), asyncio.create_task(self._send_in_parts())]

    async def _send_in_parts(self) -> httpx.Response:
        """Over a socket: httpx reads nothing before it has sent all."""
        reader, writer = await asyncio.open_connection(*self._server.listener.getsockname())
        body = json.dumps(BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:9])
        answer = asyncio.create_task(reader.read())
        await asyncio.wait({answer, asyncio.create_task(self.go_on.wait())}, return_when="FIRST_COMPLETED")
        writer.write(body[9:])
        status, _, rest = (await answer).partition(b"\r\n")
        writer.close()
        fields, _, content = rest.partition(b"\r\n\r\n")
        headers = [tuple(line.split(": ", 1)) for line in fields.decode().splitlines()]
        return httpx.Response(int(status.split()[1]), headers=headers, content=content)

    async def arrive(self) -> None:
        await until(lambda: len(self._server.app.state.server.in_flight) == len(self.tasks))


@pytest.mark.item(48)
async def test_request_before_the_engine_completes_while_draining(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        early = Early(server, client, monkeypatch)
        await early.arrive()
        server.lifecycle.on_signal()
        await until(lambda: server.app.state.server.draining)
        early.go_on.set()
        assert await server.code() == 0
        for answer in [await task for task in early.tasks]:
            assert answer.json()["choices"][0]["text"] == "Reply 0!"


@pytest.mark.item(48)
@pytest.mark.parametrize("at_once", [False, True])
async def test_request_before_the_engine_gets_503_at_shutdown(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        early = Early(server, client, monkeypatch)
        await early.arrive()
        server.lifecycle.stop_now() if at_once else server.lifecycle.on_signal()
        server.lifecycle.on_signal()
        assert await server.code() == 0
        early.go_on.set()
        for answer in [await task for task in early.tasks]:
            assert (answer.status_code, answer.headers["connection"]) == (503, "close")
            assert answer.json()["error"]["message"] == "the server is shutting down"
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


async def test_death_of_the_engine_ends_the_process(engine: FakeEngine) -> None:
    engine.hold_after = 3
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        tasks = await started(client, engine, 4)
        engine.die()
        assert await server.code() == 1
        whole, *streams = [await task for task in tasks]
        assert whole.status_code == 503
        assert all(events(response.text)[-2]["error"]["code"] == 503 for response in streams)


@pytest.mark.item(49)
async def test_failed_start_is_one_line(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.is_ready = False
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 503
        engine.dead_error = ModelLoadError("model.safetensors is cut off")
        assert await server.code() == 1
    assert capsys.readouterr().err == "error: model.safetensors is cut off\n"


async def test_broken_template_is_a_failed_start(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_server(engine, chat_template="{% if %}") as server:
        assert await server.code() == 2
    assert "chat template" in capsys.readouterr().err


@pytest.mark.item(16)
async def test_a_template_that_runs_for_ever_is_a_failed_start(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_server(engine, chat_template=ENDLESS) as server:
        server.app.state.server.preparation.limit_s = 2.0
        assert (await asyncio.to_thread(httpx.get, f"{server.url}/livez")).status_code == 200
        assert await server.code() == 2
    assert capsys.readouterr().err == "error: the chat template takes longer than 2 s for one short message\n"


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nohup` has it."""

    def start(config: EngineConfig) -> FakeEngine:
        signal.raise_signal(signal.SIGHUP)
        asyncio.get_running_loop().call_later(0.2, signal.raise_signal, signal.SIGHUP)
        asyncio.get_running_loop().call_later(0.4, ends.append, signal.SIGTERM)
        asyncio.get_running_loop().call_later(0.4, signal.raise_signal, signal.SIGTERM)
        return FakeEngine()

    ends: list[int] = []
    monkeypatch.setattr("quire.engine.async_llm.AsyncLLM.start", start)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_server(EngineConfig(), ServerConfig(port=0, uvicorn_log_level="warning")) == 0
        assert ends == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_stopping_now_cancels_at_once(engine: FakeEngine) -> None:
    engine.hold_after = 3
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        tasks = await started(client, engine, 4)
        server.lifecycle.stop_now()
        assert await server.code() == 0
        whole, *streams = [await task for task in tasks]
        assert whole.status_code == 503
        assert all(events(response.text)[-2]["error"]["code"] == 503 for response in streams)


@pytest.mark.item(49)
async def test_signal_while_loading(engine: FakeEngine) -> None:
    engine.is_ready = False
    async with live_server(engine) as server:
        await asyncio.sleep(0.02)
        server.lifecycle.on_signal()
        assert await server.code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("early", [True, False])
def test_real_signals(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, early: bool) -> None:
    engines: list[FakeEngine] = []

    def start(config: EngineConfig) -> FakeEngine:
        engines.append(FakeEngine())
        if early:
            signal.raise_signal(number)
        else:
            asyncio.get_running_loop().call_later(0.3, signal.raise_signal, number)
        return engines[0]

    monkeypatch.setattr("quire.engine.async_llm.AsyncLLM.start", start)
    if number is signal.SIGHUP:  # which whoever started the tests may have had ignored, as `nohup` does
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    assert run_server(EngineConfig(), ServerConfig(port=0, uvicorn_log_level="warning")) == 0
    assert signal.getsignal(number) == before
    assert engines[0].was_shut_down or early


@pytest.mark.item(49)
def test_port_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_server(EngineConfig(), ServerConfig(port=port)) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
    assert err.count("\n") == 1


async def test_huge_headers_are_refused(engine: FakeEngine) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        await ready(server, client)
        with contextlib.suppress(
            httpx.ReadError, httpx.WriteError
        ):  # the server may hang up while we still send
            assert (await client.get("/health", headers={"x": "y" * 200_000})).status_code in (400, 431)
        assert (await client.get("/health")).status_code == 200
