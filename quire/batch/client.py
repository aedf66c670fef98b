# SPDX-License-Identifier: Apache-2.0
"""In-process client of the server's application, and a window of requests in flight.

Invariant: a request that the server rejects because it is full is sent again; only a failed engine ends a run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.types import Message

from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.keys import Keyring

RETRY_S = 0.5  # Seconds between two attempts of a request that the server rejects because it is full.
FULL = (429, 503)
T = TypeVar("T")
R = TypeVar("R")


class BatchResponse(msgspec.Struct):
    """Status and JSON body of a response, as a batch's output has them."""

    status_code: int
    request_id: str
    body: msgspec.Raw


Ask = Callable[[str, bytes], Awaitable[BatchResponse]]
"""Sends the body of a request to a URL's path and returns the reply; raises QuireError once the engine has failed."""


class AppClient:
    """Client of the application in this process: sends requests as HTTP does, without a socket."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._engine = app.state.server.engine
        self._headers = [(b"host", b"batch"), (b"content-type", b"application/json")]

    async def ask(self, url: str, body: bytes) -> BatchResponse:
        """Return the reply to a request; see `Ask`."""
        while True:
            reply = await self._call(url, body)
            await self._engine.check_health()
            if reply.status_code not in FULL:
                return reply
            await asyncio.sleep(RETRY_S)

    async def _call(self, url: str, body: bytes) -> BatchResponse:
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
        return BatchResponse(status, request_id, msgspec.Raw(b"".join(pieces)))


def run_on_engine(
    config: EngineConfig,
    items: Iterator[T],
    answer: Callable[[Ask, T], Awaitable[R]],
    write: Callable[[R], None],
) -> None:
    """Answer all items with an engine, and write the answers in order; without items no model is loaded.

    Raises:
        QuireError: the model cannot be loaded, the engine failed, or `write` raised. Answers before that are written.
    """
    for first in items:
        asyncio.run(_run(config, itertools.chain([first], items), answer, write))


async def _run(
    config: EngineConfig,
    items: Iterable[T],
    answer: Callable[[Ask, T], Awaitable[R]],
    write: Callable[[R], None],
) -> None:
    engine = AsyncLLM.start(config)
    try:
        client = AppClient(build_app(engine, ServerConfig(), keys=Keyring({})))  # not reachable from outside
        await engine.wait_ready()
        window = 2 * engine.config.scheduler.max_num_seqs
        await answer_all(items, lambda item: answer(client.ask, item), write, window=window)
    finally:
        await engine.shutdown()


async def answer_all(
    items: Iterable[T], answer: Callable[[T], Awaitable[R]], write: Callable[[R], None], *, window: int
) -> None:
    """Answer up to `window` items at a time, and write the answers in the order of the items."""
    async with aclosing(_in_order(items, answer, window)) as answers:
        async for one in answers:
            write(one)


async def _in_order(
    items: Iterable[T], answer: Callable[[T], Awaitable[R]], window: int
) -> AsyncGenerator[R, None]:
    pending: deque[asyncio.Future[R]] = deque()
    try:
        for item in items:
            pending.append(asyncio.ensure_future(answer(item)))
            while pending and (len(pending) >= window or pending[0].done()):
                yield await pending[0]
                pending.popleft()
        while pending:
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
