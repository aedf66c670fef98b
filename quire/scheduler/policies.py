# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: the order in which requests are served.

Invariant: from its first start to its end a request keeps one rank, and no two requests share one. So the order of
started requests never changes: the first of them advances in every step (see `Scheduler`), a preempted request returns
at its old place, and no two can take each other's blocks in turn.

Invariant of `Fair`: a tenant's counter never falls, and a tenant gains nothing by not waiting. A tenant with no
running request, when it is its turn, waits for first places only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from quire.config import SchedulerConfig
from quire.scheduler.explain import Cause
from quire.scheduler.request import Rank, Request, RequestStatus
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
    (p - q)` seconds after it. It runs after at most as many steps as these and the earlier requests have tokens in
    all.
    """

    preempts = True
    overtaken = Cause.LOWER_PRIORITY

    def rank(self, request: Request) -> float:
        ageing_s = self.config.priority_ageing_s
        return request.queued_ts + ageing_s * request.priority if ageing_s else request.priority


MIN_TENANTS_TO_SWEEP = 64


class TenantState:
    """State of one tenant; `counter` is its service so far, in weighted tokens over its weight."""

    def __init__(self, weight: float) -> None:
        self.counter = 0.0
        self.num_unfinished = 0
        self.num_running = 0
        self.waiting = RankedRequests()
        self._weight = weight

    def charge(self, cost: float) -> None:
        self.counter += cost / self._weight


class Fair(Policy):
    """Virtual token counters: the tenant with the least service is next, its own requests in order.

    Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2. A counter grows by the prompt
    tokens to compute when a request starts, and by each generated token. Recomputation after a preemption is free. A
    tenant that begins to wait is lifted to the least counter of the waiting tenants.

    Beyond the paper, which does not preempt: a request that starts while its tenant runs nothing has a *first place*.
    It ranks behind earlier first places and ahead of all other requests, whose rank is their counter at their start.
    When it is the turn of a tenant that runs nothing, its request may preempt requests that it outranks, the last
    first. So one tenant can fill all rows while it is alone without making others wait for their end, and a tenant
    with a single request in a first place does not lose it to a newcomer.

    Bound (theorem 4.4 there): while two tenants wait, their counters differ by at most the larger of the longest
    prompt and of the tokens that fit the cache, as weighted. A start examines each waiting tenant once.
    """

    preempts = True
    overtaken = Cause.FAIRNESS_DEBT

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._tenants: dict[str, TenantState] = {}
        self._active: dict[str, TenantState] = {}  # waiting tenants
        self._last_active: TenantState | None = None
        self._num_waiting = 0
        self._num_kept = 0
        self._num_first_places = 0
        self._next: Request | None = None  # cached result of `peek`

    def counter(self, tenant: str) -> float:
        """Return a tenant's service so far, in weighted tokens."""
        return self._tenants[tenant].counter

    def arrive(self, request: Request) -> None:
        # Behind its tenant's preempted requests, which keep the rank of their start.
        request.rank = (math.inf, request.number)
        if request.tenant not in self._tenants:
            self._tenants[request.tenant] = TenantState(self.config.fair_weights.get(request.tenant, 1.0))
        self._tenants[request.tenant].num_unfinished += 1

    def add(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if request.tenant not in self._active:
            tenant.counter = max(tenant.counter, self._level())
            self._active[request.tenant] = tenant
            self._drop_idle_tenants()
        tenant.waiting.add(request)
        self._num_waiting += 1
        self._next = None

    def peek(self) -> Request:
        if self._next is None:
            self._next = min((tenant.waiting.first for tenant in self._active.values()), key=self._turn)
        return self._next

    def outranks(self, waiting: Request, running: Request) -> bool:
        if self._tenants[waiting.tenant].num_running:
            return False
        return self._rank_to_start(waiting) < running.rank

    def remove(self, request: Request) -> None:
        self._next = None
        tenant = self._tenants[request.tenant]
        tenant.waiting.remove(request)
        self._num_waiting -= 1
        if not tenant.waiting:
            self._last_active = self._active.pop(request.tenant)

    def start(self, request: Request, num_cached_tokens: int) -> None:
        self.remove(request)
        tenant = self._tenants[request.tenant]
        if request.status is RequestStatus.WAITING:
            request.rank = self._rank_to_start(request)
            self._num_first_places += tenant.num_running == 0
            tenant.charge(
                self.config.fair_input_token_weight * max(request.num_prompt_tokens - num_cached_tokens, 0)
            )
        tenant.num_running += 1

    def vacate(self, request: Request) -> None:
        self._tenants[request.tenant].num_running -= 1
        self._next = None

    def charge(self, chunks: Sequence[Chunk]) -> None:
        self._next = None
        cost = self.config.fair_output_token_weight
        for chunk in chunks:
            if chunk.num_samples:  # a draft costs what a token costs, right or wrong
                self._tenants[chunk.request.tenant].charge(cost * chunk.num_samples)

    def finish(self, request: Request) -> None:
        self._tenants[request.tenant].num_unfinished -= 1

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        waiting = (request for tenant in self._active.values() for request in tenant.waiting)
        return iter(sorted(waiting, key=self._turn))

    def _turn(self, request: Request) -> tuple[float, bool, Rank]:
        """Sort key: least service first, then tenants that run nothing."""
        tenant = self._tenants[request.tenant]
        return tenant.counter, tenant.num_running > 0, request.rank

    def _rank_to_start(self, request: Request) -> Rank:
        """Return the rank that a waiting request has, or would have if it started now."""
        if request.status is RequestStatus.PREEMPTED:
            return request.rank
        tenant = self._tenants[request.tenant]
        if tenant.num_running == 0:
            return -math.inf, self._num_first_places
        return tenant.counter, request.number

    def _level(self) -> float:
        """Return the least counter of the waiting tenants; without any, the counter of the last one that waited."""
        if self._active:
            return min(tenant.counter for tenant in self._active.values())
        return self._last_active.counter if self._last_active else 0.0

    def _drop_idle_tenants(self) -> None:
        """Drop tenants that would be lifted to the level anyway, because clients may invent names."""
        if len(self._tenants) < max(2 * self._num_kept, MIN_TENANTS_TO_SWEEP):
            return
        level = self._level()
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.num_unfinished or tenant.counter > level
        }
        self._num_kept = len(self._tenants)
