"""Holds: what a request needs before it can start, and somebody else has to provide.

Invariant: a held request stands in nobody's way; it is not in line until all its holds are released. Who holds a
request sees to it that the key is released in the end, whatever happens, or the request waits until it is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire.scheduler.explain import Cause
from quire.scheduler.request import Request

HoldKey = Request | str
"""A request, which is released when it ends at the latest, or a name that somebody else gives and releases."""


class Hold(NamedTuple):
    """A request is not ready until `key` is released; `cause` and `detail` tell a person why.

    Any number of requests may wait for one key.
    """

    key: HoldKey
    cause: Cause = Cause.NOT_READY
    detail: str = ""


class HeldRequests:
    """Requests that lack something."""

    def __init__(self) -> None:
        self._holds: dict[Request, dict[HoldKey, Hold]] = {}
        self._requests: dict[HoldKey, dict[Request, None]] = {}  # by key, in the order in which they came

    def add(self, request: Request, hold: Hold) -> None:
        """Let a request, held already or not, wait for one thing more."""
        self._holds.setdefault(request, {})[hold.key] = hold
        self._requests.setdefault(hold.key, {})[request] = None

    def release(self, key: HoldKey) -> list[Request]:
        """End all holds with this key; returns the requests that had one, which may have others."""
        released = self._requests.pop(key, None)
        if released is None:
            return []
        for request in released:
            del self._holds[request][key]
            if not self._holds[request]:
                del self._holds[request]
        return [*released]

    def discard(self, request: Request) -> bool:
        """Take out a request that has ended; False if it is not here."""
        for key in (holds := self._holds.pop(request, {})):
            del self._requests[key][request]
            if not self._requests[key]:
                del self._requests[key]
        return bool(holds)

    def first_hold(self, request: Request) -> Hold | None:
        """Of the things that a request lacks the one that it was held for first; None if it lacks nothing."""
        holds = self._holds.get(request)
        return next(iter(holds.values())) if holds else None

    def __contains__(self, request: Request) -> bool:
        return request in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._holds)
