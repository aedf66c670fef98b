"""Bounds the bytes of all request bodies that a process holds while they come in and are parsed.

Invariant: a body is counted from its first byte until it is parsed or its request has ended. The last quarter of the
budget is for small bodies, so large ones that never end do not keep others out.
"""

from __future__ import annotations

import asyncio
from ctypes import CDLL
from types import TracebackType

from starlette.types import Scope

from quire.errors import UnavailableError

SMALL_BYTES = 64 * 2**10  # the largest body that may use the last quarter
TRIM_ABOVE_BYTES = 32 * 2**20  # after a peak of so much, freed memory goes back to the system
RETRY_S = 2
_STATE = "held_body"


class BodyBudget:
    """Bytes of bodies; `max_bytes` for all, three quarters of it for bodies of more than `SMALL_BYTES`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._peak_bytes = 0
        self.held_bytes = 0

    def take(self, num_bytes: int, *, is_small: bool) -> None:
        """Count bytes that have come.

        Raises:
            UnavailableError: there are too many; these are not counted.
        """
        most = self._max_bytes if is_small else self._max_bytes * 3 // 4
        if self.held_bytes + num_bytes > most:
            raise UnavailableError(
                f"request bodies that are coming in hold {self.held_bytes} of {self._max_bytes} bytes "
                "(--max-receiving-bytes); try again later",
                retry_after=RETRY_S,
            )
        self.held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def give(self, num_bytes: int) -> None:
        """Count bytes that are held no longer."""
        self.held_bytes -= num_bytes
        if self._peak_bytes > TRIM_ABOVE_BYTES and self.held_bytes < self._peak_bytes // 4:
            self._peak_bytes = self.held_bytes
            asyncio.get_running_loop().run_in_executor(None, _trim)


class HeldBody:
    """One body's part of the budget, which it gives back when it is left."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises UnavailableError: the budget has not so many bytes left."""
        self._budget.take(num_bytes, is_small=self._num_bytes + num_bytes <= SMALL_BYTES)
        self._num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._budget.give(num_bytes)

    def release(self) -> None:
        """Give all of it back; twice is fine."""
        self.give(self._num_bytes)

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_body(scope: Scope, budget: BodyBudget) -> HeldBody:
    """Return a new account for the body of a request, in whose state it is found."""
    held = scope.setdefault("state", {})[_STATE] = HeldBody(budget)
    return held


def held_body(scope: Scope) -> HeldBody:
    """Return the account of a request's body."""
    held: HeldBody = scope["state"][_STATE]
    return held


def _trim() -> None:
    """Give the system what the C library keeps of freed memory, if it can."""
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
