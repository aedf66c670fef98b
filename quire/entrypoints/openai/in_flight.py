# SPDX-License-Identifier: Apache-2.0
"""In-flight HTTP requests.

Invariant: a generation ends when its client disconnects, when the server cancels it, or by itself. In each case its
coroutine has ended before `run` returns, so no task is left unowned. A request stays in flight between its parts, too.
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
    """Raised when the client has disconnected."""


@dataclass(eq=False)
class InFlightRequest:
    """One request, from admission to the end of its response.

    Attributes:
        task: the request's task.
        work: the generation that `task` awaits, if any.
        has_begun: whether a part of the response was sent.
        is_cancelled: whether the server has cancelled it.
    """

    task: asyncio.Task[Any]
    work: asyncio.Task[Any] | None = None
    has_begun: bool = False
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the request. One that has begun its response ends at its next generation, which sends the client an
        error.
        """
        self.is_cancelled = True
        if self.work is not None:
            self.work.cancel()
        elif not self.has_begun:
            self.task.cancel()


def shutdown_error() -> UnavailableError:
    """Return the error for the client of a cancelled request."""
    return UnavailableError("the server is shutting down", retry_after=5)


class InFlight:
    """Set of in-flight requests: runs generations while watching the connections, waits for them and cancels them.

    Args:
        on_disconnect: called for every client that disconnects before its response is complete.
    """

    def __init__(self, on_disconnect: Callable[[], None] = lambda: None) -> None:
        self._on_disconnect = on_disconnect
        self._visits: dict[asyncio.Task[Any], InFlightRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._visits)

    @contextmanager
    def visit(self) -> Iterator[InFlightRequest]:
        """Register the current task as in flight; returns the existing entry if it is registered."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        if task in self._visits:
            yield self._visits[task]
            return
        self._visits[task] = InFlightRequest(task)
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
            ClientDisconnectedError: the client disconnected; `work` has been cancelled.
            UnavailableError: `cancel_all` was called.
        """
        with self.visit() as visit:
            task = asyncio.ensure_future(work)
            visit.work = task
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                if visit.is_cancelled:  # cancelled between two parts of the request
                    raise shutdown_error()
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    self._on_disconnect()
                    raise ClientDisconnectedError
                if task.cancelled():
                    raise shutdown_error()
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
