"""The generations that clients are waiting for right now.

Invariant: a generation ends when its client goes away, when the server gives up waiting for it, or by itself;
in every case its coroutine has ended before `run` returns, so nothing keeps running unowned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from quire.errors import UnavailableError

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """Nobody is there to read the answer."""


class InFlight:
    """Runs generations against their clients' connections, and can wait for or cancel all of them.

    Args:
        on_disconnect: called for every client that goes away before its answer is complete.
    """

    def __init__(self, on_disconnect: Callable[[], None] = lambda: None) -> None:
        self._on_disconnect = on_disconnect
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Await `work` while watching the connection; the request's body must have been read.

        Raises:
            ClientDisconnectedError: the client went away; `work` has been cancelled.
            UnavailableError: `cancel_all` was called.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(receive))
        self._add(task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._on_disconnect()
                raise ClientDisconnectedError
            if task.cancelled():
                raise UnavailableError("the server is shutting down", retry_after=5)
            return task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            self._remove(task)

    def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def _add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        self._idle.clear()

    def _remove(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
