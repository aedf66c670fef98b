# SPDX-License-Identifier: Apache-2.0
"""A client that goes away aborts its request, whatever the request was doing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.config import DEMO_MODEL, EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai import chat_prompt, prompts
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.fake_engine import FakeEngine

BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 50},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
SEVERAL = {"prompt": ["a", "b", "c"], "n": 2}


class Client:
    """Sends one request straight into the app, and hangs up when told."""

    def __init__(self, path: str, body: dict[str, Any], *, cut_body: bool = False) -> None:
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "server": ("quire", 80), "client": ("me", 1),
        }  # fmt: skip
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        data = json.dumps(body).encode()
        self._parts = [
            {"type": "http.request", "body": data[:5] if cut_body else data, "more_body": cut_body}
        ]

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            return self._parts.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.item(32)
@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), [*BODIES.items(), ("/v1/completions", SEVERAL)])
async def test_disconnect_aborts(path: str, body: dict[str, Any], streamed: bool, num_steps: int) -> None:
    engine = FakeEngine()
    engine.hold_after = num_steps
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    client = Client(path, {**body, "stream": streamed})
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    await until(lambda: len(engine.running) == num_prompts)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not serving.done()
    client.gone.set()
    await asyncio.wait_for(serving, 30)
    assert not engine.running
    assert len(engine.closed) == num_prompts
    assert not len(app.state.server.in_flight)
    assert "[DONE]" not in client.text


@pytest.mark.item(32)
async def test_disconnect_during_upload(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    client = Client("/v1/completions", {"prompt": "hi"}, cut_body=True)
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await asyncio.sleep(0.01)
    client.gone.set()
    await asyncio.wait_for(serving, 30)
    assert not engine.seen
    assert not client.sent
    assert not caplog.records


@pytest.mark.item(32)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_disconnect_while_it_is_tokenized(
    path: str, body: dict[str, Any], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begun = FakeEngine(), asyncio.Event()
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]

    async def endless(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    for module in (prompts, chat_prompt):
        monkeypatch.setattr(module, "beside_loop", endless)
    client = Client(path, {**body, "stream": streamed})
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await asyncio.wait_for(begun.wait(), 30)
    assert len(engine.waiting) == 1
    client.gone.set()
    await asyncio.wait_for(serving, 30)
    assert not engine.seen
    assert not client.sent
    assert (len(engine.waiting), len(app.state.server.in_flight)) == (0, 0)


@pytest.mark.item(32)
@pytest.mark.parametrize("streamed", [False, True])
async def test_disconnect_while_its_grammar_is_compiled(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the real engine, whose executor computes nothing."""
    args = {"distributed_executor_backend": "null", "num_gpu_blocks_override": 200}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    await engine.wait_ready()
    begun = asyncio.Event()

    async def endless(_params: Any, _tenant: str) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine.input_processor.constraints, "validated_async", endless)
    app = build_app(engine, ServerConfig())
    client = Client("/v1/completions", {**SEVERAL, "stream": streamed, "structured_outputs": {"regex": "a"}})
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await asyncio.wait_for(begun.wait(), 30)
    assert len(engine.output_processor.waiting) == 6
    client.gone.set()
    await asyncio.wait_for(serving, 30)
    assert (len(engine.output_processor.waiting), engine.num_unfinished_requests()) == (0, 0)
    assert (client.sent, len(app.state.server.in_flight)) == ([], 0)
    await engine.shutdown()


async def test_refusal_of_one_prompt_closes_the_others() -> None:
    engine = FakeEngine()
    app = build_app(engine, ServerConfig())  # type: ignore[arg-type]
    for streamed in (False, True):
        client = Client("/v1/completions", {"prompt": ["ok", [999], "ok"], "stream": streamed})
        await asyncio.wait_for(app(client.scope, client.receive, client.send), 30)
        assert client.sent[0]["status"] == 400
        assert not engine.running
