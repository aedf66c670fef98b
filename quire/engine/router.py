"""`Router`: which core gets a request, and what each core has to do.

Invariant: a request counts on one core from when it is sent there until it ends; the tokens of its prompt count until
the first news of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.cache_news import CacheNews
from quire.engine.ledger import Load, Page
from quire.engine.loads import Loads
from quire.engine.routing_policies import POLICIES, RoutedRequest
from quire.scheduler.output import SchedulerStats


@dataclass
class _Sent:
    """Where a request is, and what of its prompt is still counted there."""

    request: RoutedRequest
    first_id: str
    core: int = 0
    num_waiting: int = 0


class Router:
    """Chooses cores by `--routing-policy`. With one core it is asked, too, and costs next to nothing."""

    def __init__(self, config: EngineConfig, num_cores: int) -> None:
        self._block_size = config.cache.block_size
        name = config.parallel.routing_policy if num_cores > 1 else "round_robin"
        self._policy = POLICIES[name](config, Loads(num_cores), num_cores)
        self._num_cores = num_cores
        self._sent: dict[str, _Sent] = {}
        self._unheard: dict[str, str] = {}

    def share(self, page: Page) -> None:
        """Count with the other front ends of the cores; to be called before there are requests."""
        self._policy.loads = Loads(self._num_cores, page)

    def route(self, name: str, request: RoutedRequest, first_id: str, cores: Sequence[int]) -> int:
        """A core of these for a new request, whose first sequence has this core id."""
        self._sent[name] = _Sent(request, first_id)
        return self._send(name, cores)

    def move(self, name: str, cores: Sequence[int]) -> int:
        """Another core for a request whose own is gone; it begins anew there."""
        self._count(self._sent[name], -1)
        return self._send(name, cores)

    def heard(self, core_ids: Iterable[str]) -> None:
        """There is news of these sequences."""
        for core_id in core_ids if self._unheard else ():
            if (name := self._unheard.pop(core_id, None)) is not None:
                self._no_longer_waits(self._sent[name])

    def end(self, name: str) -> None:
        """A request has ended."""
        sent = self._sent.pop(name)
        self._unheard.pop(sent.first_id, None)
        self._count(sent, -1)

    def ready(self, core: int, num_blocks: int, block_size: int | None = None) -> None:
        """A core has loaded, and has so many blocks, of so many tokens; None: as configured."""
        self._policy.ready(core, num_blocks, block_size or self._block_size)

    def lost(self, core: int) -> None:
        """A core is gone, and what was in its cache."""
        self.ready(core, 0)
        self._policy.loads.put(core, Load.KV_USE, 0.0)

    def observe(self, core: int, stats: SchedulerStats) -> None:
        """What a core has told of itself."""
        self._policy.loads.put(core, Load.KV_USE, stats.kv_cache_usage)

    def cached(self, core: int, news: CacheNews) -> None:
        """What a core has told of its prefix cache."""
        self._policy.cached(core, news)

    def _send(self, name: str, cores: Sequence[int]) -> int:
        sent = self._sent[name]
        request = sent.request
        sent.core = core = self._policy.choose(request, cores)
        sent.num_waiting = self._policy.num_uncached(request, core)
        self._policy.sent(request, core)
        self._unheard[sent.first_id] = name
        self._count(sent, 1)
        return core

    def _count(self, sent: _Sent, sign: int) -> None:
        self._policy.loads.add(sent.core, Load.SEQUENCES, sign * sent.request.num_sequences)
        self._policy.loads.add(sent.core, Load.WAITING_TOKENS, sign * sent.num_waiting)

    def _no_longer_waits(self, sent: _Sent) -> None:
        self._policy.loads.add(sent.core, Load.WAITING_TOKENS, -sent.num_waiting)
        sent.num_waiting = 0
