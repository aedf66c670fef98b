"""Policies: the order in which requests are served.

Invariant: from its first start to its end a request keeps one rank, and no two requests share one. So the started
requests stand in an order that never turns: the first of them advances in every step (see `Scheduler`), a preempted
one comes back at its old place, and no two can take each other's blocks in turn.
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
    """Requests in the order in which they are served; their ranks do not change while they are in here.

    A sorted list: a search compares a few ranks, and moving pointers costs less than a tree would.
    """

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


class Policy(ABC):
    """Owns the requests in line, and ranks all: the lower rank is served first.

    Attributes:
        preempts: whether a waiting request may outrank a running one, and so take its place.
        overtaken: why a request waits while a later one has started.
    """

    preempts = False
    overtaken = Cause.BEHIND

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    @abstractmethod
    def arrive(self, request: Request) -> None:
        """Rank a new request, whose `queued_ts` and `number` are set; it may not be ready to wait in line yet."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Let a request wait at the place of its rank: it is new, was held, or was preempted."""

    @abstractmethod
    def peek(self) -> Request:
        """The request that starts next; one must be waiting."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out a waiting request from wherever it stands."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in the order in which they would start if nothing else happened."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may start at the cost of a running one, over which it then ranks for good."""
        return False

    def start(self, request: Request, num_cached_tokens: int) -> None:
        """Take out a waiting request, which is about to run with so many tokens computed already."""
        self.remove(request)

    def vacate(self, request: Request) -> None:  # noqa: B027 - a policy may take no note
        """Take note that a running request has lost its row: it was preempted, or is about to end."""

    def charge(self, chunks: Sequence[Chunk]) -> None:  # noqa: B027
        """Take note of what a step computes."""

    def finish(self, request: Request) -> None:  # noqa: B027
        """Take note that a request, which is not in line any more, has ended."""


class FixedOrder(Policy):
    """A policy whose order is settled when a request arrives; a subclass says how, by `rank` alone."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._waiting = RankedRequests()

    @abstractmethod
    def rank(self, request: Request) -> float:
        """The lower, the sooner; requests of equal rank are served in the order of their arrival."""

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
    """The lower priority value first; `ageing_s` seconds of waiting are worth one level.

    Ageing at a steady rate never changes which of two requests is ahead: it is the one with the smaller
    `queued_ts + ageing_s * priority`, as if each came `ageing_s` later for each level. So the order is fixed.

    Bound: a request of priority p is overtaken only by those of a priority q < p that come less than
    `ageing_s * (p - q)` seconds after it. It runs after at most as many steps as these and those that came before
    it have tokens in all.
    """

    preempts = True
    overtaken = Cause.LOWER_PRIORITY

    def rank(self, request: Request) -> float:
        ageing_s = self.config.priority_ageing_s
        return request.queued_ts + ageing_s * request.priority if ageing_s else request.priority
