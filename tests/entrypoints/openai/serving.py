# SPDX-License-Identifier: Apache-2.0
"""Ways to put the app in front of a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI

from quire.config import ServerConfig
from quire.entrypoints.openai.api_server import bind
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.connection import http_config
from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle
from tests.entrypoints.openai.conformance import contract_of
from tests.entrypoints.openai.fake_engine import FakeEngine


class CheckedClient(httpx.AsyncClient):
    """Holds every reply against the document of its server."""

    def __init__(self, app: FastAPI) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://quire")
        self._app = app

    async def request(self, method: str, url: Any, **options: Any) -> httpx.Response:
        response = await super().request(method, url, **options)
        if method not in ("HEAD", "OPTIONS"):  # which the document leaves to HTTP
            root = self._app.state.server.config.root_path
            contract_of(self._app).check(method, response.request.url.path.removeprefix(root), response)
        return response


PATIENT: dict[str, Any] = {"chat_template_timeout": 60.0}
"""A busy machine may take longer over a template than the default, which is 2 s of the clock."""


def client_for(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    """A client that calls the app directly."""
    return CheckedClient(build_app(engine, ServerConfig(**PATIENT | options)))  # type: ignore[arg-type]


class LiveServer:
    """A lifecycle on a free port; `code` is its exit code once it ended."""

    def __init__(self, engine: FakeEngine, **options: Any) -> None:
        settings = {name: options.pop(name) for name in ("needs_key", "service_manager") if name in options}
        config = ServerConfig(port=0, uvicorn_log_level="warning", **PATIENT | options)
        self.listener = bind(config.host, config.port)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.app = build_app(engine, config)  # type: ignore[arg-type]
        self.http = HttpServer(http_config(self.app, config), config)
        self.lifecycle = Lifecycle(
            self.app.state.server, self.http, self.listener, **{"needs_key": False, **settings}
        )
        self.task = asyncio.create_task(self.lifecycle.run())

    async def code(self) -> int:
        return await asyncio.wait_for(self.task, 300)


@contextlib.asynccontextmanager
async def live_server(engine: FakeEngine, **options: Any) -> AsyncIterator[LiveServer]:
    server = LiveServer(engine, **options)
    try:
        yield server
    finally:
        server.lifecycle.on_signal()
        server.lifecycle.on_signal()
        await asyncio.gather(server.task, return_exceptions=True)


def events(body: str) -> list[Any]:
    """The JSON of each event of a stream; [DONE] stays text."""
    lines = [line for line in body.split("\n\n") if line and line != ":"]  # a comment is a sign of life
    frames = [line.removeprefix("data: ") for line in lines]
    assert all(line.startswith("data: ") for line in lines)
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


def named_events(body: str) -> list[Any]:
    """The JSON of each event of a stream whose events have names, which must be those in the JSON."""
    received = []
    for text in body.removesuffix("\n\n").split("\n\n"):
        if text == ":" or text.startswith("event: ping"):
            continue
        name, data = text.split("\n")
        received.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {received[-1]['type']}"
    return received


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """All events of a streamed answer, checked to be a well-formed stream."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    received = events(response.text)
    assert received[-1] == "[DONE]"
    assert received.count("[DONE]") == 1
    return received[:-1]
