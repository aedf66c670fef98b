"""The first of several API processes: it binds the port, owns the cores and the other processes, and serves like them.

Invariant: signals are its business alone, and its exit code is the server's. Its end is everybody's.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import TYPE_CHECKING

from quire.config import ServerConfig
from quire.engine.ledger import Column, Ledger
from quire.entrypoints.openai.api_server import http_config
from quire.entrypoints.openai.app import build_app, keyring
from quire.entrypoints.openai.census import SharedCensus
from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle
from quire.entrypoints.openai.processes.door import FIRST, Door
from quire.entrypoints.openai.processes.house import House
from quire.entrypoints.openai.processes.messages import Hello
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError
from quire.metrics.stats import IterationStats

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


async def serve_first(engine: AsyncLLM, config: ServerConfig, listener: socket.socket) -> int:
    """Serve; returns the process's exit code. The caller shuts the engine down."""
    keys = keyring(config)
    num_cores = engine.config.parallel.num_replicas
    ledger = Ledger.create(config.api_server_count, len(keys.tenants), num_cores)
    page = ledger.page(FIRST)
    engine.share(page)
    app = build_app(engine, config, keys=keys, page=page)
    http = HttpServer(http_config(app, config, SharedCensus(page, whole=bool(config.max_connections))))
    state: ServerState = app.state.server
    hello = Hello(FIRST, config.api_server_count, FIRST, engine.config, config, keys.tenants)
    house = House(state, engine, ledger, hello)
    state.siblings = house
    engine.watch_cores(house)
    engine.sleep_with(house)
    house.open()
    with closing(ledger):
        try:
            return await FirstLifecycle(state, http, listener, house, ledger).run()
        finally:
            await house.close()


class FirstLifecycle(Lifecycle):
    """Ends the others, each in its way, before this process ends."""

    def __init__(
        self, state: ServerState, http: HttpServer, listener: socket.socket, house: House, ledger: Ledger
    ) -> None:
        super().__init__(state, http, listener, needs_key=bool(state.keys))
        self._house = house
        self._tokens = TokensElsewhere(ledger)
        self._door = Door(listener, ledger, http.admit, house.rooms)

    async def run(self) -> int:
        self._opening = asyncio.create_task(self._open())
        return await super().run()

    async def _open(self) -> None:
        """Connections wait in the kernel until there is somebody who takes them."""
        await self._http.is_open.wait()
        self._door.open()

    def _listeners(self) -> list[socket.socket]:
        return []

    def _stop_accepting(self) -> None:
        self._opening.cancel()
        self._door.close()

    def _tell_end(self, error: QuireError) -> None:
        super()._tell_end(error)
        self._house.end(str(error))

    def _begin_draining(self) -> None:
        super()._begin_draining()
        self._house.drain()

    async def _wait_idle(self) -> None:
        await super()._wait_idle()
        await self._house.wait_gone()

    def _cancel_all(self) -> None:
        super()._cancel_all()
        self._house.cancel()

    def _elsewhere(self) -> IterationStats:
        return self._tokens.since_last()


class TokensElsewhere:
    """What the other processes have computed, by the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen = dict[tuple[int, Column], float]()

    def since_last(self) -> IterationStats:
        return IterationStats(
            num_prompt_tokens=self._news(Column.COMPUTED_TOKENS),
            num_generation_tokens=self._news(Column.GENERATED_TOKENS),
        )

    def _news(self, column: Column) -> int:
        num_tokens = 0.0
        for page in range(FIRST + 1, self._ledger.num_pages):
            before, now = self._seen.get((page, column), 0.0), self._ledger.get(page, column)
            num_tokens += now - before if now >= before else now  # a new process counts anew
            self._seen[page, column] = now
        return int(num_tokens)
