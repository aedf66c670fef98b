"""`RankedRequests`: requests in the order in which they are served.

Invariant: sorted by `request.rank`, lowest first. Ranks differ and do not change while a request is in here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from quire.scheduler.request import Request

_rank = attrgetter("rank")


class RankedRequests:
    """A sorted list: a search compares a few ranks, and moving pointers costs less than a tree would."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take out a request from wherever it stands."""
        place = bisect_left(self._requests, request.rank, key=_rank)
        assert self._requests[place] is request, f"{request!r} is not where its rank says"
        del self._requests[place]

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
