# SPDX-License-Identifier: Apache-2.0
"""Rate limits: a tenant's requests and tokens per minute, and its concurrent requests.

Invariant: limits are counted per tenant over all API processes, and checked before the body is read. Tokens are counted
from the engine's statistics after they were computed. A request may thus overdraw the minute's tokens; later ones wait
until the debt is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableSequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.shared_counters import CounterField, CounterSlot, SharedCounters
from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.keys import Tenant
from quire.errors import RateLimitError
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

Clock = Callable[[], float]
PREFIX = "x-ratelimit-"
RATE_LIMIT_HEADERS = tuple(
    f"{PREFIX}{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class TokenBucket:
    """Token bucket of one minute's allowance, refilled continuously; `limit` None: unlimited.

    `cells` hold the used amount and its timestamp; initially 0 and 0.
    """

    def __init__(
        self, limit: int | None, clock: Clock, cells: MutableSequence[float] | memoryview[float]
    ) -> None:
        self.limit = limit
        self._limit = math.inf if limit is None else float(limit)
        self._cells = cells
        self._clock = clock

    def wait_s(self, wanted: float) -> float:
        """Return the seconds until `wanted` is available; 0: now."""
        if self.limit is None:
            return 0.0
        return max(0.0, (wanted + self._used() - self._limit) * 60 / self._limit)

    def headers(self, unit: str) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate limit headers; none if unlimited."""
        if self.limit is None:
            return []
        values = {
            "limit": str(self.limit),
            "remaining": str(max(0, math.floor(self._limit - self._used()))),
            "reset": duration(self.wait_s(self._limit)),
        }
        return [(f"{PREFIX}{what}-{unit}".encode(), value.encode()) for what, value in values.items()]

    def take(self, amount: float) -> None:
        if self.limit is not None:
            self._cells[0], self._cells[1] = self._used() + amount, self._clock()

    def _used(self) -> float:
        """Return the amount used as of now."""
        used, since = self._cells
        return max(0.0, used - (self._clock() - since) * self._limit / 60)


class Meter:
    """Usage of one tenant over all API processes.

    Args:
        number: index of the tenant's account in the shared counters.
    """

    def __init__(self, tenant: Tenant, number: int, slot: CounterSlot, clock: Clock) -> None:
        self._tenant = tenant
        self._slot = slot
        self._column = len(CounterField) + number
        account = slot.counters.account(number)
        self._requests = TokenBucket(tenant.requests_per_minute, clock, account[:2])
        self._tokens = TokenBucket(tenant.tokens_per_minute, clock, account[2:])

    def enter(self) -> None:
        """Count a new request; every successful call needs a `leave`.

        Raises:
            RateLimitError: a limit is reached.
        """
        tenant = self._tenant
        with self._slot.counters.locked():
            num_running = int(self._slot.total(self._column))
            if tenant.max_concurrent is not None and num_running >= tenant.max_concurrent:
                raise RateLimitError(
                    f"{num_running} requests of this key are running, which is its limit", retry_after=1
                )
            _refuse_for(self._requests.wait_s(1), f"{tenant.requests_per_minute} requests per minute")
            _refuse_for(self._tokens.wait_s(1), f"{tenant.tokens_per_minute} tokens per minute")
            self._requests.take(1)
            self._slot.add(self._column, 1)

    def spend(self, num_tokens: int) -> None:
        """Count computed tokens."""
        with self._slot.counters.locked():
            self._tokens.take(num_tokens)

    def leave(self) -> None:
        self._slot.add(self._column, -1)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the rate limit headers of a response."""
        with self._slot.counters.locked():
            return [*self._requests.headers("requests"), *self._tokens.headers("tokens")]


def duration(seconds: float) -> str:
    """Format a duration as OpenAI and Go do: 20ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s" if minutes else f"{ms / 1000:g}s"


def _refuse_for(wait_s: float, limit: str) -> None:
    if wait_s > 0:
        raise RateLimitError(f"the limit of this key is {limit}", retry_after=math.ceil(wait_s))


class Meters(StatLogger):
    """Meters of all tenants; as a StatLogger it counts the tokens of every finished request.

    A prompt's computed tokens are counted once, with the first of its sequences that ends.
    """

    def __init__(
        self, tenants: Mapping[str, Tenant], clock: Clock = time.monotonic, slot: CounterSlot | None = None
    ) -> None:
        slot = slot or SharedCounters(1, len(tenants)).slot(0)
        self._meters = {
            name: Meter(tenant, number, slot, clock) for number, (name, tenant) in enumerate(tenants.items())
        }

    def __getitem__(self, tenant: str) -> Meter:
        return self._meters[tenant]

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        for one in iteration.finished:
            num_computed = one.num_prompt_tokens - one.num_cached_tokens if one.has_prompt else 0
            self._spend(one.tenant, num_computed + one.num_generation_tokens)
        for tenant, num_tokens in iteration.wasted_prompt_tokens.items():
            self._spend(tenant, num_tokens)

    def _spend(self, tenant: str, num_tokens: int) -> None:
        if tenant in self._meters and num_tokens:
            self._meters[tenant].spend(num_tokens)


class Quota:
    """Answers 429 with Retry-After if the tenant's limits are reached; only POST counts.

    Every response to a POST carries the rate limit headers.
    """

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        if tenant is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        meter = self._meters[tenant]

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *meter.headers()]
            await send(message)

        try:
            meter.enter()
        except RateLimitError as error:
            await response_of(error, request_id_of(scope))(scope, receive, send_with_limits)
            return
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            meter.leave()
