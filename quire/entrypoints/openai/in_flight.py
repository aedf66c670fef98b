"""The requests that clients are waiting for right now.

Invariant: a generation ends when its client goes away, when the server gives up waiting for it, or by itself;
in every case its coroutine has ended before `run` returns, so nothing keeps running unowned. A request is in flight
between its parts, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from quire.errors import UnavailableError

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """Nobody is there to read the answer."""


@dataclass(eq=False)
class Visit:
    """One request, from when it is admitted to the end of its answer.

    Attributes:
        task: its own.
        work: the generation that `task` awaits, if it does.
        has_begun: whether a part of the answer was sent.
        is_cancelled: whether the server has given up waiting for it.
    """

    task: asyncio.Task[Any]
    work: asyncio.Task[Any] | None = None
    has_begun: bool = False
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End it. One that has begun its answer ends itself when it goes on generating, so that its client is told."""
        self.is_cancelled = True
        if self.work is not None:
            self.work.cancel()
        elif not self.has_begun:
            self.task.cancel()


def given_up() -> UnavailableError:
    """What the client of a cancelled request is told."""
    return UnavailableError("the server is shutting down", retry_after=5)


class InFlight:
    """Runs generations against their clients' connections, and can wait for or cancel all requests.

    Args:
        on_disconnect: called for every client that goes away before its answer is complete.
    """

    def __init__(self, on_disconnect: Callable[[], None] = lambda: None) -> None:
        self._on_disconnect = on_disconnect
        self._visits: dict[asyncio.Task[Any], Visit] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._visits)

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        """Be in flight for as long as the current task is in here; the same visit, if it is already."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        if task in self._visits:
            yield self._visits[task]
            return
        self._visits[task] = Visit(task)
        self._idle.clear()
        try:
            yield self._visits[task]
        finally:
            del self._visits[task]
            if not self._visits:
                self._idle.set()

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Await `work` while watching the connection; the request's body must have been read.

        Raises:
            ClientDisconnectedError: the client went away; `work` has been cancelled.
            UnavailableError: `cancel_all` was called.
        """
        with self.visit() as visit:
            task = asyncio.ensure_future(work)
            visit.work = task
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                if visit.is_cancelled:  # between two parts of it
                    raise given_up()
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    self._on_disconnect()
                    raise ClientDisconnectedError
                if task.cancelled():
                    raise given_up()
                return task.result()
            finally:
                task.cancel()
                gone.cancel()
                await asyncio.gather(task, gone, return_exceptions=True)
                visit.work = None

    def cancel_all(self) -> None:
        for visit in self._visits.values():
            visit.cancel()

    async def wait_idle(self) -> None:
        await self._idle.wait()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
