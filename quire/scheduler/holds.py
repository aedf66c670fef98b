# SPDX-License-Identifier: Apache-2.0
"""Holds: conditions other than scheduling that a request waits for before it may start.

Invariant: a held request blocks no other; it is queued only once all its holds are released. The owner of a hold must
release its key eventually, or the request waits until it is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire.scheduler.explain import Cause
from quire.scheduler.request import Request

HoldKey = Request | str
"""A request (released when it finishes at the latest), or a name chosen and released by the holder."""


class Hold(NamedTuple):
    """Condition that keeps a request from being ready until `key` is released.

    `cause` and `detail` explain it to a person. Any number of requests may wait for one key.
    """

    key: HoldKey
    cause: Cause = Cause.NOT_READY
    detail: str = ""


class HeldRequests:
    """Requests that are not ready, indexed by request and by hold key."""

    def __init__(self) -> None:
        self._holds: dict[Request, dict[HoldKey, Hold]] = {}
        self._requests: dict[HoldKey, dict[Request, None]] = {}  # by key, in the order in which they came

    def add(self, request: Request, hold: Hold) -> None:
        """Add one more hold to a request, whether or not it is held already."""
        self._holds.setdefault(request, {})[hold.key] = hold
        self._requests.setdefault(hold.key, {})[request] = None

    def release(self, key: HoldKey) -> list[Request]:
        """Remove all holds with this key; returns the requests that had one, which may have other holds."""
        released = self._requests.pop(key, None)
        if released is None:
            return []
        for request in released:
            del self._holds[request][key]
            if not self._holds[request]:
                del self._holds[request]
        return [*released]

    def discard(self, request: Request) -> bool:
        """Remove a finished request; False if it is not held."""
        for key in (holds := self._holds.pop(request, {})):
            del self._requests[key][request]
            if not self._requests[key]:
                del self._requests[key]
        return bool(holds)

    def first_hold(self, request: Request) -> Hold | None:
        """Return the oldest hold of a request; None if it has none."""
        holds = self._holds.get(request)
        return next(iter(holds.values())) if holds else None

    def __contains__(self, request: Request) -> bool:
        return request in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._holds)
