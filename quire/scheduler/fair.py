# SPDX-License-Identifier: Apache-2.0
"""Fair policy: virtual token counters of tenants.

Invariant: a tenant's counter never falls, and a tenant gains nothing by not waiting. A tenant with no running request,
when it is its turn, waits for first places only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from quire.config import SchedulerConfig
from quire.scheduler.explain import Cause
from quire.scheduler.policies import Policy, RankedRequests
from quire.scheduler.request import Rank, Request, RequestStatus
from quire.scheduler.step import Chunk

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
                self._tenants[chunk.request.tenant].charge(cost * chunk.num_samples * chunk.request.num_rows)

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
