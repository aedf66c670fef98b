# SPDX-License-Identifier: Apache-2.0
"""Interface of the asynchronous engine to its sleep, found in `quire.features.SLEEP_CONTROL`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.sleep_state import EngineSleepState
from quire.errors import ConflictError
from quire.features import SLEEP_CONTROL
from quire.plugins import import_place

_MISSING = "this installation has no sleep mode (quire.sleep)"


class OtherFrontEnds(Protocol):
    """Front ends of the same cores in other processes."""

    async def rest(self, rest: EngineSleepState, *, is_falling_asleep: bool) -> None:
        """Send them the sleep state, and whether they must reject requests because more will sleep; returns once they
        have it.
        """

    async def abort(self) -> None:
        """Abort all of their requests."""

    async def num_unfinished(self) -> int:
        """Return their sequences in flight."""


class SleepControl:
    """Sleep of one front end, which sends by `send`; this class is an engine that cannot sleep."""

    others: OtherFrontEnds | None = None
    """Other front ends of the cores, if there are any."""

    def __init__(self, front_end: FrontEnd, send: Callable[[list[Outgoing]], None]) -> None:
        self._front_end = front_end
        self._send = send

    @property
    def is_sleeping(self) -> bool:
        """True if a part is asleep or about to sleep."""
        return bool(self._front_end.rest) or self._front_end.is_falling_asleep

    @property
    def refuses(self) -> bool:
        """True if new requests are refused."""
        return self._front_end.rest.refuses or self._front_end.is_falling_asleep

    async def sleep(self, level: int, mode: str) -> None:
        """Put the cores to sleep; see `AsyncLLM.sleep`."""
        raise ConflictError(_MISSING)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop planning steps; see `AsyncLLM.pause_generation`."""
        raise ConflictError(_MISSING)

    async def resume(self) -> None:
        """Plan steps again; see `AsyncLLM.resume_generation`."""
        raise ConflictError(_MISSING)

    async def replace_weights(
        self, model_dir: str, version: str, adopt: Callable[[], None], *, keeps_cache: bool
    ) -> None:
        """Use other weights in all cores or none; see `AsyncLLM.replace_weights`."""
        raise ConflictError(_MISSING)

    async def rename_weights(self, version: str) -> None:
        """Set the version of the weights in use."""
        raise ConflictError(_MISSING)

    async def wake_up(self, tags: Collection[str] | None) -> None:
        """Wake the tagged parts, or all; see `AsyncLLM.wake_up`."""
        raise ConflictError(_MISSING)


def make_sleep_control(front_end: FrontEnd, send: Callable[[list[Outgoing]], None]) -> SleepControl:
    """Return the sleep control in the table, or one that refuses."""
    kinds: list[type[SleepControl]] = [import_place(place) for place in SLEEP_CONTROL.values()]
    return next(iter(kinds), SleepControl)(front_end, send)
