# SPDX-License-Identifier: Apache-2.0
"""A server process without a model, kept so that the next load finds torch and quire imported.

Invariant: at most one, and none while it is not wanted. Whoever takes it owns it. One that ends by itself is replaced,
after a time that doubles with each end in a row, so a machine that cannot start processes is left in peace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from quire.model_router.planner import FIRST_BACKOFF_S, MAX_BACKOFF_S

logger = logging.getLogger(__name__)


class Endable(Protocol):
    """Process that can be killed."""

    @property
    def has_ended(self) -> bool:
        """True if it does not run any more."""

    def kill(self) -> None:
        """End it at once."""

    async def ended(self) -> str:
        """Wait until it has ended; return why, for people."""


Process = TypeVar("Process", bound=Endable)


class Spare(Generic[Process]):
    """Owner of at most one process.

    Args:
        spawn: starts a process; raises OSError if the machine refuses it.
    """

    def __init__(self, spawn: Callable[[], Awaitable[Process]]) -> None:
        self._spawn = spawn
        self._is_wanted = False
        self._process: Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[str] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._num_ends = 0

    @property
    def is_there(self) -> bool:
        """True if a process runs, also one that is about to begin or to end."""
        return any(one is not None for one in (self._process, self._starting, self._ending))

    def keep(self, is_wanted: bool) -> None:
        """Start a process unless there is one, or end the one that there is."""
        self._is_wanted = is_wanted
        if not is_wanted:
            self._end()
        elif not self.is_there and self._retry is None:
            self._starting = asyncio.create_task(self._start())

    async def take(self) -> Process | None:
        """Return the process, which is the caller's from now on; None if there is none."""
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._process is None or self._process.has_ended:
            return None  # its watcher reports the end
        self._num_ends = 0
        return self._give_up()

    async def settle(self) -> None:
        """Wait until a process that is not wanted has ended."""
        while not self._is_wanted and (work := self._starting or self._ending) is not None:
            await asyncio.wait({work})

    async def close(self) -> None:
        """End the process, if there is one, and start none any more."""
        self.keep(False)
        await self.settle()

    async def _start(self) -> None:
        try:
            self._process = await self._spawn()
        except OSError as error:
            self._retry_later(f"it cannot be started: {error.strerror}")
        else:
            self._watching = asyncio.create_task(self._watch(self._process))
        finally:
            self._starting = None
        if not self._is_wanted:
            self._end()

    async def _watch(self, process: Process) -> None:
        reason = await process.ended()
        self._process = self._watching = None
        self._retry_later(reason)

    def _give_up(self) -> Process | None:
        process, self._process = self._process, None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        return process

    def _end(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        process = self._give_up()
        if process is not None:
            process.kill()
            self._ending = asyncio.ensure_future(process.ended())
            self._ending.add_done_callback(self._note_end)

    def _note_end(self, _: asyncio.Task[str]) -> None:
        self._ending = None
        self.keep(self._is_wanted)

    def _retry_later(self, reason: str) -> None:
        if not self._is_wanted:
            return
        after_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._num_ends)
        self._num_ends += 1
        logger.warning("the spare server has ended: %s; another one is started in %g s", reason, after_s)
        self._retry = asyncio.get_running_loop().call_later(after_s, self._start_again)

    def _start_again(self) -> None:
        self._retry = None
        self.keep(self._is_wanted)
