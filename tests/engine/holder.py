# SPDX-License-Identifier: Apache-2.0
"""A `Hold` for tests: requests wait for a value that the test provides later."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from quire.engine.core import EngineCore
from quire.scheduler.holds import Hold
from quire.scheduler.request import Request


class Holder:
    """Stands between a core and its scheduler, and holds the sequences of a request until what it needs is there.

    A core that has nothing else to do waits until something is.
    """

    def __init__(self, core: EngineCore) -> None:
        self.num_held = 0
        self._needs: dict[str, Sequence[str]] = {}
        self._awaited: dict[str, None] = {}
        self._scheduler = core.scheduler
        self._add_request, self._has_work = core.scheduler.add_request, core.scheduler.has_work
        core.scheduler.add_request = self._add_held  # type: ignore[method-assign]
        core.scheduler.has_work = self._wait_for_work  # type: ignore[method-assign]

    def expect(self, name: str, needs: Sequence[str]) -> None:
        """A request will need these things."""
        self._needs[name] = needs

    def provide(self, key: str) -> None:
        """Something is there for all who need it."""
        self._awaited.pop(key, None)
        self._scheduler.release(key, time.monotonic())

    def _add_held(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        needs = self._needs.get(request.request_id.rpartition("-")[0], ())
        self._add_request(request, now, [*holds, *(Hold(key, detail=key) for key in needs)])
        self._awaited.update(dict.fromkeys(needs))
        self.num_held += bool(needs)

    def _wait_for_work(self) -> bool:
        while self._awaited and not self._has_work():
            self.provide(next(iter(self._awaited)))
        return self._has_work()
