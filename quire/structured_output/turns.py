# SPDX-License-Identifier: Apache-2.0
"""Fair queue for a few concurrent checks, by tenant.

Invariant: a named tenant occupies at most half of the places, and at least one; the waiting tenant charged least is
next. Waiting is bounded per tenant and in total. The unnamed tenant stands for all requests without one; it may occupy
every place until a named tenant comes.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from types import TracebackType

from quire.errors import UnavailableError

MAX_WAITING = 256
MAX_WAITING_OF_TENANT = 64
MAX_TENANTS = 1024  # most accounts kept
MIN_COST_S = 0.01  # minimal charge of a turn, so that many cheap ones count


class Turn:
    """Entry in the queue, then one of the places; ends with its `with` block, or with the work in it.

    Attributes:
        granted: completed when the work may begin.
        cost_s: seconds charged to the tenant.
    """

    def __init__(self, queue: FairTurns, tenant: str) -> None:
        self._queue = queue
        self._is_ended = False
        self.tenant = tenant
        self.granted: Future[None] = Future()
        self.is_running = False
        self.cost_s = 0.0

    def start(self) -> None:
        """Claim the place for a thread that calls `end` itself, because the request may be cancelled.

        Raises:
            UnavailableError: the `with` block has ended.
        """
        with self._queue.lock:
            if self._is_ended:
                raise UnavailableError("the request ended before its constraint was checked")
            self.is_running = True

    def end(self) -> None:
        """Release the place; idempotent."""
        with self._queue.lock:
            if not self._is_ended:
                self._is_ended = True
                self._queue.leave(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._queue.lock:
            is_running = self.is_running
        if not is_running:
            self.end()


class _Tenant:
    """Account of a tenant."""

    def __init__(self) -> None:
        self.charged_s = 0.0
        self.num_granted = 0
        self.waiting: deque[Turn] = deque()

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.num_granted)


class FairTurns:
    """Fair queue; thread-safe.

    Args:
        num_places: turns granted at the same time.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_free = num_places
        self._num_waiting = 0
        self._tenants: dict[str, _Tenant] = {}
        self.lock = threading.RLock()

    def take(self, tenant: str) -> Turn:
        """Join the queue.

        Raises:
            UnavailableError: the queue is full, for this tenant or in total.
        """
        with self.lock:
            account = self._account(tenant)
            for num, most, whose in (
                (len(account.waiting), MAX_WAITING_OF_TENANT, " of this tenant"),
                (self._num_waiting, MAX_WAITING, ""),
            ):
                if num >= most:
                    raise UnavailableError(f"{num} constraints{whose} wait to be checked, which is the limit")
            turn = Turn(self, tenant)
            account.waiting.append(turn)
            self._num_waiting += 1
            self._grant()
            return turn

    def leave(self, turn: Turn) -> None:
        """Remove a turn, waiting or granted; for `Turn.end`, which holds the lock."""
        account = self._tenants[turn.tenant]
        if turn in account.waiting:
            account.waiting.remove(turn)
            self._num_waiting -= 1
        else:
            account.charged_s += max(turn.cost_s, MIN_COST_S)
            account.num_granted -= 1
            self._num_free += 1
        self._grant()

    def _account(self, name: str) -> _Tenant:
        """Return the account of a tenant; absence does not accumulate credit."""
        account = self._tenants.pop(name, None) or _Tenant()
        if not account.is_active:
            levels = [one.charged_s for one in self._tenants.values() if one.is_active]
            account.charged_s = max(account.charged_s, min(levels, default=0.0))
        self._tenants[name] = account
        idle = [key for key, one in self._tenants.items() if not one.is_active and key != name]
        for key in idle[: max(0, len(self._tenants) - MAX_TENANTS)]:
            del self._tenants[key]
        return account

    def _grant(self) -> None:
        while self._num_free:
            ready = [one for name, one in self._tenants.items() if one.waiting and self._may_have(name, one)]
            if not ready:
                return
            account = min(ready, key=lambda one: (one.charged_s, one.num_granted))
            turn = account.waiting.popleft()
            self._num_waiting -= 1
            account.num_granted += 1
            self._num_free -= 1
            if turn.granted.set_running_or_notify_cancel():
                turn.granted.set_result(None)

    def _may_have(self, name: str, account: _Tenant) -> bool:
        if not name and len(self._tenants) == 1:
            return True
        return account.num_granted < max(1, self._num_places // 2)
