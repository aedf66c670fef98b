# SPDX-License-Identifier: Apache-2.0
"""`SleepController`: sleep and wake-up of the asynchronous engine.

Invariant: one transition at a time. No request is accepted while the engine is about to sleep, even if that fails. If
the cores have several front ends, one of them decides and notifies the others: their requests are in the same cores,
which keep or abort them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.sleep_control import OtherFrontEnds, SleepControl
from quire.engine.sleep_state import (
    SCHEDULING,
    WEIGHTS,
    EngineSleepState,
    check_level,
    check_mode,
    check_tags,
)
from quire.errors import ConflictError

IDLE_POLL_S = 0.02  # Interval at which the end of all requests is polled.


class NoOtherFrontEnds:
    """Implementation for cores with a single front end."""

    async def rest(self, rest: EngineSleepState, *, is_falling_asleep: bool) -> None:
        """Do nothing."""

    async def abort(self) -> None:
        """Do nothing."""

    async def num_unfinished(self) -> int:
        return 0


class SleepController(SleepControl):
    """Sleep and wake-up (see `AsyncLLM`) for one front end that sends by `send`, and for `others`."""

    others: OtherFrontEnds

    def __init__(self, front_end: FrontEnd, send: Callable[[list[Outgoing]], None]) -> None:
        super().__init__(front_end, send)
        self._lock = asyncio.Lock()
        self._waking = set[asyncio.Task[None]]()
        self.others = NoOtherFrontEnds()

    async def sleep(self, level: int, mode: str, *, admits: bool = False) -> None:
        """Abort, await or keep the requests in flight, then put the cores to sleep; `admits`: queue new requests."""
        level, mode = check_level(level), check_mode(mode)
        self._front_end.check_can_sleep()
        self._front_end.is_falling_asleep = not admits
        try:
            await self._notify()
            if mode == "abort":
                self._send(self._front_end.abort(self._front_end.labels()))
                await self.others.abort()
            elif mode == "wait":
                await self._until_idle()
            async with self._lock:
                answers, messages = self._front_end.sleep(level, admits=admits)
                self._send(messages)
                await asyncio.gather(*map(asyncio.wrap_future, answers))
        finally:
            self._front_end.is_falling_asleep = False
            await self._notify()

    async def wake_up(self, tags: Collection[str] | None) -> None:
        """Wake the tagged parts, or all, even if the caller is cancelled."""
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
            await self._notify()

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop planning steps; with "keep" new requests are queued, else refused. Without cache, kept requests are
        computed again.
        """
        await self.sleep(0, mode, admits=check_mode(mode) == "keep")
        if clear_cache and WEIGHTS not in self._front_end.rest.asleep:
            async with self._lock:
                await self._all("forget_cache")

    async def resume(self) -> None:
        """Plan steps again.

        Raises:
            ConflictError: memory is asleep.
        """
        await self.wake_up([SCHEDULING])

    async def replace_weights(
        self, model_dir: str, version: str, adopt: Callable[[], None], *, keeps_cache: bool
    ) -> None:
        """Load weights beside those in use on all cores, then use them on all, even if the caller is cancelled.

        Args:
            adopt: is called in between; a core that starts later must have the new ones.
            keeps_cache: whether running requests keep what the old weights have computed.

        Raises:
            ValidationError: they do not fit, or the engine is not paused; the old ones stay on all cores.
        """
        replacing = asyncio.create_task(
            self._replace_weights(model_dir, version, adopt, keeps_cache=keeps_cache)
        )
        self._waking.add(replacing)
        replacing.add_done_callback(self._waking.discard)
        await asyncio.shield(replacing)

    async def _replace_weights(
        self, model_dir: str, version: str, adopt: Callable[[], None], *, keeps_cache: bool
    ) -> None:
        async with self._lock:
            try:
                await self._all("prepare_weights", model_dir)
            except Exception:
                await self._all("drop_weights")
                raise
            adopt()
            await self._all("commit_weights", model_dir, keeps_cache)
            await self._rename_weights(version)

    async def rename_weights(self, version: str) -> None:
        """Set the version of the weights in use."""
        async with self._lock:
            await self._rename_weights(version)

    async def _rename_weights(self, version: str) -> None:
        self._front_end.rest = replace(self._front_end.rest, weight_version=version)
        await self._notify()

    async def _all(self, method: str, *args: object) -> None:
        """Call a utility of every core, and wait for all answers; then raise the first error."""
        answers, messages = self._front_end.call_all(method, *args)
        self._send(messages)
        found = await asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one

    async def _notify(self) -> None:
        await self.others.rest(self._front_end.rest, is_falling_asleep=self._front_end.is_falling_asleep)

    async def _until_idle(self) -> None:
        """Wait until no request is in flight."""
        while self._front_end.num_unfinished or await self.others.num_unfinished():
            await asyncio.sleep(IDLE_POLL_S)
            self._front_end.check_health()
            if not self.is_sleeping:
                raise ConflictError("the engine was woken before its requests had ended")
