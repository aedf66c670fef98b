"""`Bedtime`: the asynchronous engine falls asleep and wakes.

Invariant: one of the two at a time; while it is about to sleep no request comes in, also if falling asleep fails. Where
the cores have several front ends, one of them decides, and tells the others what sleeps: their requests are in the
same cores, which keep them or hear that they were aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.sleep import Rest, check_level, check_mode, check_tags
from quire.errors import ConflictError

IDLE_POLL_S = 0.02
"""How often who waits for all requests to end looks whether they have."""


class OtherFrontEnds(Protocol):
    """Those that the cores have in other processes."""

    async def rest(self, rest: Rest, *, dozes: bool) -> None:
        """Tell them what sleeps, and whether they take no requests because more is about to; until they know."""

    async def abort(self) -> None:
        """End all of their requests."""

    async def num_unfinished(self) -> int:
        """Sequences that they have in flight."""


class NoOthers:
    """The cores have one front end."""

    async def rest(self, rest: Rest, *, dozes: bool) -> None:
        """Nobody has to know."""

    async def abort(self) -> None:
        """There is nothing to end."""

    async def num_unfinished(self) -> int:
        return 0


class Bedtime:
    """The verbs, as `AsyncLLM` describes them, for one front end that sends by `send`, and for `others`."""

    def __init__(self, front_end: FrontEnd, send: Callable[[list[Outgoing]], None]) -> None:
        self._front_end = front_end
        self._send = send
        self._lock = asyncio.Lock()
        self._waking = set[asyncio.Task[None]]()
        self.others: OtherFrontEnds = NoOthers()

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, or is about to."""
        return bool(self._front_end.rest) or self._front_end.dozes

    async def sleep(self, level: int, mode: str) -> None:
        """Deal with the requests in flight, then put the cores to sleep."""
        level, mode = check_level(level), check_mode(mode)
        self._front_end.check_can_sleep()
        self._front_end.dozes = True
        try:
            await self._tell()
            if mode == "abort":
                self._send(self._front_end.abort(self._front_end.labels()))
                await self.others.abort()
            elif mode == "wait":
                await self._until_idle()
            async with self._lock:
                answers, messages = self._front_end.sleep(level)
                self._send(messages)
                await asyncio.gather(*map(asyncio.wrap_future, answers))
        finally:
            self._front_end.dozes = False
            await self._tell()

    async def wake_up(self, tags: Collection[str] | None) -> None:
        """Wake what these tags name, or all; also if the caller does not wait for it."""
        waking = asyncio.create_task(self._wake(check_tags(tags)))
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)
        await asyncio.shield(waking)

    async def _wake(self, wanted: list[str]) -> None:
        async with self._lock:
            rest, answers, messages = self._front_end.wake_up(wanted)
            self._send(messages)
            await asyncio.gather(*map(asyncio.wrap_future, answers))
            self._front_end.rest = rest
            await self._tell()

    async def _tell(self) -> None:
        await self.others.rest(self._front_end.rest, dozes=self._front_end.dozes)

    async def _until_idle(self) -> None:
        """Wait until no request is in flight."""
        while self._front_end.num_unfinished or await self.others.num_unfinished():
            await asyncio.sleep(IDLE_POLL_S)
            self._front_end.check_health()
            if not self.is_sleeping:
                raise ConflictError("the engine was woken before its requests had ended")
