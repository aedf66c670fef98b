"""What a tenant may use in a minute, and at once.

Invariant: counted per tenant of the keys and over all processes of the server, so a client cannot split itself; a
request is refused before its body is read. Tokens are counted when they have been computed, by the engine's own
statistics, so that a request may overdraw the minute's tokens, and the next ones wait until the debt is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableSequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.ledger import Column, Ledger, Page
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


class Bucket:
    """A minute's allowance, which fills steadily; `limit` None: there is no end of it.

    `cells` are how much of it was used up, and when; 0 and 0 at first.
    """

    def __init__(
        self, limit: int | None, clock: Clock, cells: MutableSequence[float] | memoryview[float]
    ) -> None:
        self.limit = limit
        self._limit = math.inf if limit is None else float(limit)
        self._cells = cells
        self._clock = clock

    def wait_s(self, wanted: float) -> float:
        """Seconds until `wanted` is there; 0: now."""
        if self.limit is None:
            return 0.0
        return max(0.0, (wanted + self._used() - self._limit) * 60 / self._limit)

    def headers(self, unit: str) -> list[tuple[bytes, bytes]]:
        """The allowance, what is left of it, and when it is whole again, as OpenAI tells it; none if it has no end."""
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
        """As of now."""
        used, since = self._cells
        return max(0.0, used - (self._clock() - since) * self._limit / 60)


class Meter:
    """One tenant's use, in all processes of the server.

    Args:
        number: of the tenant's account in the ledger.
    """

    def __init__(self, tenant: Tenant, number: int, page: Page, clock: Clock) -> None:
        self._tenant = tenant
        self._page = page
        self._column = len(Column) + number
        account = page.ledger.account(number)
        self._requests = Bucket(tenant.requests_per_minute, clock, account[:2])
        self._tokens = Bucket(tenant.tokens_per_minute, clock, account[2:])

    def enter(self) -> None:
        """Count a request that begins; every one that may is to `leave`.

        Raises:
            RateLimitError: it may not yet.
        """
        tenant = self._tenant
        with self._page.ledger.locked():
            num_running = int(self._page.total(self._column))
            if tenant.max_concurrent is not None and num_running >= tenant.max_concurrent:
                raise RateLimitError(
                    f"{num_running} requests of this key are running, its limit", retry_after=1
                )
            _refuse_for(self._requests.wait_s(1), f"{tenant.requests_per_minute} requests per minute")
            _refuse_for(self._tokens.wait_s(1), f"{tenant.tokens_per_minute} tokens per minute")
            self._requests.take(1)
            self._page.add(self._column, 1)

    def spend(self, num_tokens: int) -> None:
        """So many were computed."""
        with self._page.ledger.locked():
            self._tokens.take(num_tokens)

    def leave(self) -> None:
        self._page.add(self._column, -1)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a response tells of the limits."""
        with self._page.ledger.locked():
            return [*self._requests.headers("requests"), *self._tokens.headers("tokens")]


def duration(seconds: float) -> str:
    """As OpenAI writes it, and Go: 20ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s" if minutes else f"{ms / 1000:g}s"


def _refuse_for(wait_s: float, limit: str) -> None:
    if wait_s > 0:
        raise RateLimitError(f"the limit of this key is {limit}", retry_after=math.ceil(wait_s))


class Meters(StatLogger):
    """All tenants' meters; as a logger of the engine's statistics it sees the tokens of every request that ended.

    A prompt is paid once, by the first of its sequences, and by one that ended early as far as it was computed.
    """

    def __init__(
        self, tenants: Mapping[str, Tenant], clock: Clock = time.monotonic, page: Page | None = None
    ) -> None:
        page = page or Ledger(1, len(tenants)).page(0)
        self._meters = {
            name: Meter(tenant, number, page, clock) for number, (name, tenant) in enumerate(tenants.items())
        }

    def __getitem__(self, tenant: str) -> Meter:
        return self._meters[tenant]

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        for one in iteration.finished:
            num_computed = one.num_prompt_tokens - one.num_cached_tokens if one.has_prompt else 0
            self._spend(one.tenant, num_computed + one.num_generation_tokens)
        for tenant, num_tokens in iteration.spent_in_vain.items():
            self._spend(tenant, num_tokens)

    def _spend(self, tenant: str, num_tokens: int) -> None:
        if tenant in self._meters and num_tokens:
            self._meters[tenant].spend(num_tokens)


class Quota:
    """429 with Retry-After for work of a tenant who has used up what it may; what only asks is free.

    Every answer to work says what is left of the limits.
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
