# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: the order in which requests are served.

Invariant: from its first start to its end a request keeps one rank, and no two requests share one. So the order of
started requests never changes: the first of them advances in every step (see `Scheduler`), a preempted request returns
at its old place, and no two can take each other's blocks in turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from quire.config import SchedulerConfig
from quire.scheduler.explain import Cause
from quire.scheduler.request import Request
from quire.scheduler.step import Chunk

_rank = attrgetter("rank")


class RankedRequests:
    """Requests in order of service; their ranks do not change while they are in here.

    A sorted list: a search compares a few ranks, and moving pointers costs less than a tree would.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Remove a request at any position."""
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


class Policy(ABC):
    """Ranking of all requests, and owner of the ready queue: the lower rank is served first.

    Attributes:
        preempts: whether a waiting request may outrank a running one and take its place.
        overtaken: cause of waiting while a later request has started.
    """

    preempts = False
    overtaken = Cause.BEHIND

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    @abstractmethod
    def arrive(self, request: Request) -> None:
        """Rank a new request, whose `queued_ts` and `number` are set; it may not be ready yet."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request at the place of its rank: it is new, was held, or was preempted."""

    @abstractmethod
    def peek(self) -> Request:
        """Return the request that starts next; one must be waiting."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a waiting request at any position."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Iterate over waiting requests in the order in which they would start if nothing else happened."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Return whether a waiting request may preempt a running one; it then outranks it for good."""
        return False

    def start(self, request: Request, num_cached_tokens: int) -> None:
        """Dequeue a waiting request that is about to run with `num_cached_tokens` tokens computed already."""
        self.remove(request)

    def vacate(self, request: Request) -> None:  # noqa: B027 - optional
        """Account for a running request that lost its row: it was preempted, or is about to finish."""

    def charge(self, chunks: Sequence[Chunk]) -> None:  # noqa: B027
        """Account for the tokens that a step computes."""

    def finish(self, request: Request) -> None:  # noqa: B027
        """Account for a request that has finished and is no longer queued."""


class FixedOrder(Policy):
    """Policy whose order is fixed when a request arrives; a subclass defines `rank`."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._waiting = RankedRequests()

    @abstractmethod
    def rank(self, request: Request) -> float:
        """Return the rank, lower first; requests of equal rank are served in order of arrival."""

    def arrive(self, request: Request) -> None:
        request.rank = (self.rank(request), request.number)

    def add(self, request: Request) -> None:
        self._waiting.add(request)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return self.preempts and waiting.rank < running.rank

    def peek(self) -> Request:
        return self._waiting.first

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class FCFS(FixedOrder):
    """First come, first served.

    Bound: a request runs after at most as many steps as those before it have tokens in all, whatever comes later.
    """

    def rank(self, request: Request) -> float:
        return 0


class Priority(FixedOrder):
    """Lower priority values first; `ageing_s` seconds of waiting are worth one level.

    Ageing at a steady rate never changes which of two requests is ahead: it is the one with the smaller
    `queued_ts + ageing_s * priority`, as if each came `ageing_s` later for each level. So the order is fixed.

    Bound: a request of priority p is overtaken only by requests of a priority q < p that arrive less than `ageing_s *
    (p - q)` seconds after it. It runs after at most as many steps as these and the earlier requests have tokens in all.
    """

    preempts = True
    overtaken = Cause.LOWER_PRIORITY

    def rank(self, request: Request) -> float:
        ageing_s = self.config.priority_ageing_s
        return request.queued_ts + ageing_s * request.priority if ageing_s else request.priority
