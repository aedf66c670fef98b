# SPDX-License-Identifier: Apache-2.0
"""Clients that send the traffic, leave when they like, and write down whatever they should not have seen."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.said import Said
from benchmarks.soak.traffic import BAD, Bad, Good, good_requests

BAD_SHARE = 0.05
LEAVING_SHARE = 0.2
STREAMED_SHARE = 0.6
HANG_S = 60.0
MAX_COMPLAINTS = 20
JSON = {"content-type": "application/json"}


@dataclass
class Findings:
    """Findings of the clients; `complaints` is empty if all was well."""

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    said: dict[Good, Said] = field(default_factory=dict)

    def complain(self, text: str) -> None:
        self.outcomes["violations"] += 1
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(text)

    def compare(self, good: Good, said: Said) -> None:
        """A request says the same whenever it is sent, and streamed what it says whole."""
        first = self.said.setdefault(good, said)
        if first != said:
            self.complain(f"{good.name} said {said} and before {first}")


class Clients:
    """So many at once, until they are told to end.

    `may_refuse` says whether 503 is an answer now: while a core that was killed is replaced.
    """

    def __init__(
        self,
        url: str,
        num_clients: int,
        seed: int,
        good: Sequence[Good] | None = None,
        bad: Sequence[Bad] = BAD,
    ) -> None:
        self.findings = Findings()
        self.may_refuse = False
        self._good = good_requests() if good is None else good
        self._bad = bad
        self._rng = random.Random(seed)
        self._url, self._num_clients = url, num_clients
        self._ended = False

    async def run(self, seconds: float) -> None:
        """Send for so long, then let what is under way end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._num_clients // 2)
        async with httpx.AsyncClient(base_url=self._url, timeout=HANG_S, limits=limits) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(self._num_clients)]
            await asyncio.sleep(seconds)
            self._ended = True
            await asyncio.gather(*workers)

    async def _work(self, client: httpx.AsyncClient) -> None:
        while not self._ended:
            share = self._rng.random()
            if share < BAD_SHARE:
                await self._send_bad(client, self._rng.choice(self._bad))
            else:
                leaves = share < BAD_SHARE + LEAVING_SHARE
                await self._send_good(client, self._rng.choice(self._good), leaves)

    async def _send_bad(self, client: httpx.AsyncClient, bad: Bad) -> None:
        reply = await self._guarded(bad.path, client.post(bad.path, content=bad.content, headers=JSON))
        if reply is None or self._is_refused(reply):
            return
        self.findings.outcomes["bad, refused"] += 1
        if reply.status_code not in bad.statuses:
            self.findings.complain(
                f"{bad.content[:60]!r} to {bad.path}: {reply.status_code} {reply.text[:200]}"
            )

    async def _send_good(self, client: httpx.AsyncClient, good: Good, leaves: bool) -> None:
        body = {**good.body, "stream": self._rng.random() < STREAMED_SHARE}
        patience = self._rng.expovariate(1 / 0.1) if leaves else None
        begun = time.monotonic()
        exchange = self._exchange(client, good, body, patience)
        said = await self._guarded(good.name, exchange)
        if said is not None:
            self.findings.outcomes["good, answered"] += 1
            self.findings.seconds.append(time.monotonic() - begun)
            self.findings.compare(good, said)

    async def _exchange(
        self, client: httpx.AsyncClient, good: Good, body: dict[str, Any], patience: float | None
    ) -> Said | None:
        """Return the reply; None if the client left first, or was told to come later."""
        try:
            async with asyncio.timeout(patience):
                return await self._ask(client, good, body)
        except TimeoutError:
            self.findings.outcomes["good, left"] += 1
            return None

    async def _ask(self, client: httpx.AsyncClient, good: Good, body: dict[str, Any]) -> Said | None:
        async with client.stream("POST", good.family.path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                if not self._is_refused(reply):
                    self.findings.complain(f"{good.name}: {reply.status_code} {reply.text[:200]}")
                return None
            if body["stream"]:
                return good.family.stream([line async for line in reply.aiter_lines()])
            await reply.aread()
            return good.family.whole(reply.json())

    def _is_refused(self, reply: httpx.Response) -> bool:
        """Whether the client is told to come later, and that is in order."""
        is_refused = reply.status_code == 503 and self.may_refuse and "retry-after" in reply.headers
        self.findings.outcomes["told to come later"] += is_refused
        return is_refused

    async def _guarded(self, name: str, work: Any) -> Any:
        """The result; None if it hung, broke off or was no proper reply, which is written down."""
        try:
            return await work
        except httpx.TimeoutException:
            self.findings.complain(f"{name}: no answer within {HANG_S:g} s")
        except httpx.TransportError as error:
            self.findings.complain(f"{name}: the connection broke: {error!r}")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self.findings.complain(f"{name}: {error!r}")
        return None
