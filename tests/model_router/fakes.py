# SPDX-License-Identifier: Apache-2.0
"""A router in this process, in front of tiny servers that are told what to do."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from quire.config import ModelRouterConfig, ServerConfig
from quire.entrypoints.openai.connection import http_config
from quire.entrypoints.openai.lifecycle import HttpServer
from quire.errors import ConfigError
from quire.model_router.app import RouterApp
from quire.model_router.child_http import ChildLostError
from quire.model_router.flags import server_flags
from quire.model_router.memory import Estimate
from quire.model_router.metrics import RouterMetrics
from quire.model_router.models_file import ModelEntry, Models
from quire.model_router.planner import PlannerLimits, RouterPlanner
from quire.model_router.router import ModelRouter, RouterSettings, rules_of
from quire.unix_sockets import listen_unix

WAIT_S = 30.0
MIB = 2**20


class FakeChild:
    """Server of one model: it echoes, streams piece by piece, and dies on demand.

    Attributes:
        requests: paths that were asked for.
        controls: admin routes that were called.
        pieces: what a stream sends next; None ends it.
        disconnects: set when a client left a stream.
    """

    def __init__(self, name: str, flags: Mapping[str, Any], directory: Path, number: int) -> None:
        self.name = name
        self.flags = flags
        self.socket = str(directory / f"{number}.sock")
        self.admin_key = "child-admin"
        self.requests: list[str] = []
        self.controls: list[str] = []
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.disconnected = asyncio.Event()
        self.num_sent = 0
        self.can_sleep = True
        self.may_start = asyncio.Event()
        self.reason = "exit code 0"
        self._end = asyncio.Event()
        self._listener = listen_unix(self.socket)
        config = uvicorn.Config(
            self._answer, ws="none", lifespan="off", log_config=None, http="h11", interface="asgi3"
        )
        self._server = HttpServer(config, ServerConfig())
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def wait_ready(self) -> None:
        starting, ending = (
            asyncio.ensure_future(self.may_start.wait()),
            asyncio.ensure_future(self._end.wait()),
        )
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        ending.cancel()
        if self._end.is_set():
            raise ChildLostError(self.reason)

    async def control(self, path: str) -> bool:
        self.controls.append(path)
        return self.can_sleep

    def terminate(self, *, at_once: bool = False) -> None:
        self.pieces.put_nowait(None)
        self._end.set()

    def kill(self) -> None:
        self.die("killed by signal 9 (Killed)")

    def die(self, reason: str) -> None:
        """End at once: every connection is cut."""
        self.reason = reason
        Path(self.socket).unlink(missing_ok=True)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        self._end.set()

    async def ended(self) -> str:
        await self._end.wait()
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        return self.reason

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.requests.append(scope["path"])
        body = await request.body()
        fields = {}
        with suppress(ValueError):
            fields = json.loads(body)
        if isinstance(fields, dict) and fields.get("stream"):
            await self._stream(str(fields["stream"]), receive, send)
            return
        said = {
            "child": self.name,
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "body": body.decode(errors="replace"),
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
        }
        reply = json.dumps(said).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    async def _stream(self, media_type: str, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", media_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(receive())
        while True:
            piece = asyncio.ensure_future(self.pieces.get())
            await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                piece.cancel()
                self.disconnected.set()
                return
            body = piece.result()
            await send({"type": "http.response.body", "body": body or b"", "more_body": body is not None})
            self.num_sent += len(body or b"")
            if body is None:
                gone.cancel()
                return


class FakeStarter:
    """Starts fake children.

    Attributes:
        children: the latest of each model.
        num_starts: by model.
        holds: models whose loads wait until `may_start` is set.
        fails: model -> reason for which its next loads fail.
        has_spare: whether a process without a model is there; a load takes it.
        taken: models that were loaded in the spare process, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.has_spare = False
        self.taken: list[str] = []
        self.children: dict[str, FakeChild] = {}
        self.num_starts: dict[str, int] = {}
        self.holds: set[str] = set()
        self.fails: dict[str, str] = {}
        self._directory = directory

    async def __call__(self, name: str, flags: Mapping[str, Any]) -> FakeChild:
        self.num_starts[name] = self.num_starts.get(name, 0) + 1
        self.taken += [name] if self.has_spare else []
        self.has_spare = False
        child = FakeChild(name, flags, self._directory, sum(self.num_starts.values()))
        self.children[name] = child
        if name in self.fails:
            child.die(self.fails[name])
        elif name not in self.holds:
            child.may_start.set()
        return child

    def keep_spare(self, is_wanted: bool) -> None:
        self.has_spare = is_wanted

    async def settle(self) -> None:
        """Its memory is back at once."""

    async def close(self) -> None:
        self.has_spare = False


class RouterService:
    """A router that listens on a port, its client, and what stands behind it."""

    def __init__(self, app: RouterApp, starter: FakeStarter, client: httpx.AsyncClient, port: int) -> None:
        self.app = app
        self.router = app.router
        self.starter = starter
        self.client = client
        self.port = port
        self._file: Models | ConfigError = app.router.models

    def write(self, *entries: ModelEntry, default: str | None = None) -> None:
        """Change the models file."""
        self._file = Models({one.name: one for one in entries}, default)

    def garble(self, error: ConfigError) -> None:
        """Change the models file to one with a mistake."""
        self._file = error

    def read(self) -> Models:
        """Read the models file."""
        if isinstance(self._file, ConfigError):
            raise self._file
        return self._file

    def child(self, model: str) -> FakeChild:
        return self.starter.children[model]

    async def ask(self, model: str | None = None, **fields: Any) -> httpx.Response:
        """A completion of a model."""
        named = {} if model is None else {"model": model}
        return await self.client.post("/v1/completions", json={**named, **fields})

    def status(self, model: str) -> str:
        return str(self.router.state(model).status)

    async def until(self, condition: Any) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - anything may change it
                await asyncio.sleep(0.01)


def entry(name: str, **fields: Any) -> ModelEntry:
    """A model of 4 MiB that does not sleep, unless told otherwise."""
    return ModelEntry(
        **{"name": name, "model": f"path/to/{name}", "memory_bytes": 4 * MIB, "sleep": False, **fields}
    )


@asynccontextmanager
async def serving(
    *entries: ModelEntry,
    memory: int = 10 * MIB,
    default: str | None = None,
    limits: Mapping[str, Any] = {},
    config: ServerConfig | None = None,
    settings: ModelRouterConfig | None = None,
    keeps_spare: bool = False,
) -> AsyncIterator[RouterService]:
    """Serve models by fake children; all have ended and no request is in flight when the block ends."""
    models = Models({one.name: one for one in entries}, default)
    config, settings, registry = (
        config or ServerConfig(),
        settings or ModelRouterConfig(),
        CollectorRegistry(),
    )
    with tempfile.TemporaryDirectory() as directory:
        starter = FakeStarter(Path(directory))
        router = ModelRouter(
            models,
            RouterPlanner({one.name: rules_of(one) for one in entries}, PlannerLimits(memory, **limits)),
            start=starter,
            measure=lambda one: Estimate(0, MIB, 0, one.memory_bytes),
            flags=lambda one, size: server_flags(one, size, config),
            available_bytes=lambda: 1 << 60,
            metrics=RouterMetrics(registry),
            settings=RouterSettings(60.0, 10.0, keeps_spare=keeps_spare),
        )
        app = RouterApp(router, config, settings, registry, lambda: service.read())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            http = HttpServer(http_config(app.build(), config), config)
            running = asyncio.create_task(http.serve(sockets=[listener]))
            router.open()
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
                    service = RouterService(app, starter, client, port)
                    yield service
                async with asyncio.timeout(WAIT_S):
                    await app.in_flight.wait_idle()
            finally:
                await router.close()
                http.should_exit = True
                await running
        assert all(state.charged_bytes == 0 for state in router.planner.models.values())
