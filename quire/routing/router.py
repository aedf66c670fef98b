# SPDX-License-Identifier: Apache-2.0
"""Routing of requests to cores.

Invariant of `Router`: a request counts on one core from when it is sent there until it ends; the tokens of its prompt
count until its first update.

Invariant of policies: pure. Ties are broken by the request alone, so the same requests under the same loads take the
same routes. Costs are in prompt tokens that would have to be computed first, or again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from quire.config import EngineConfig
from quire.engine.core_choice import CoreChoice
from quire.engine.messages import CacheDelta
from quire.engine.shared_counters import CounterSlot, LoadCounter, SharedCounters
from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes
from quire.routing.cache_deltas import block_keys, delta_keys
from quire.scheduler.output import SchedulerStats

K = TypeVar("K", bound=Hashable)


class LruSet(Generic[K]):
    """LRU set of at most `max_keys` keys."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, keys: Iterable[K]) -> None:
        """Mark keys as used; the last one becomes the most recent."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def drop(self, key: K) -> None:
        """Remove a key, if present."""
        self._keys.pop(key, None)


class CachedPrefixes:
    """Prompt blocks in a core's prefix cache: those it reported, and those of prompts sent there that it has yet to
    report.

    Without reports, the most recently sent blocks are assumed to be cached.

    Args:
        max_blocks: capacity of the cache.

    Invariant: with a block the preceding blocks of its prompt are mostly present: none of them was used earlier, and a
    cache evicts the last ones first. So the cached prefix is found by bisection.
    """

    def __init__(self, max_blocks: int) -> None:
        self._reported: set[int] = set()
        self._sent: LruSet[int] = LruSet(max_blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._reported or block in self._sent

    def num_known(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's blocks are cached, from its start on."""
        return bisect_left(blocks, True, key=lambda block: block not in self)

    def use(self, blocks: Sequence[int]) -> None:
        """Record that a prompt with these blocks was sent."""
        self._sent.use(reversed(blocks))

    def apply(self, delta: CacheDelta) -> None:
        """Apply a delta; sent blocks that were lost again are removed, and so is all content before a clear."""
        if delta.is_cleared:
            self._reported.clear()
        self._reported.update(delta_keys(delta.stored))
        for block in delta_keys(delta.lost):
            self._reported.discard(block)
            self._sent.drop(block)


# Cost of a sequence in flight for one beside it: each of its tokens makes the other's steps longer.
SEQUENCE_TOKENS = 48
ADAPTER_TOKENS = 512  # Cost of loading an adapter that a core does not have.
HOME_PREFIX_TOKENS = 64  # Prompts with the same first tokens have one home core, all else being equal.
MAX_BLOCKS = 1 << 18  # Most sent blocks remembered per core, some 40 MB.


@dataclass(frozen=True)
class RoutedRequest:
    """Properties of a request that determine its route."""

    token_ids: list[int]
    num_sequences: int
    keys: ExtraKeys

    def blocks(self, block_size: int) -> list[int]:
        """Return the keys of the full blocks of its prompt, for this block size."""
        if block_size not in self._blocks:
            hashes: list[BlockHash] = []
            extend_hashes(hashes, self.token_ids, block_size, self.keys)
            self._blocks[block_size] = block_keys(hashes)
        return self._blocks[block_size]

    @cached_property
    def _blocks(self) -> dict[int, list[int]]:
        return {}


class RoutingPolicy(ABC):
    """Policy that chooses among cores by their loads.

    Attributes:
        loads: of all cores.
    """

    def __init__(self, config: EngineConfig, loads: CoreLoads, num_cores: int) -> None:
        self.loads = loads
        self._config = config
        self._num_cores = num_cores

    @abstractmethod
    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        """Return one of these cores."""

    def num_uncached(self, request: RoutedRequest, core: int) -> int:
        """Return the prompt tokens that this core is expected to compute."""
        return len(request.token_ids)

    def sent(self, request: RoutedRequest, core: int) -> None:  # noqa: B027
        """Record that a request was sent to a core."""

    def ready(self, core: int, num_blocks: int, block_size: int) -> None:  # noqa: B027
        """Record a new core with an empty KV cache of `num_blocks` blocks of `block_size` tokens."""

    def cached(self, core: int, delta: CacheDelta) -> None:  # noqa: B027
        """Apply a core's prefix cache delta."""


class RoundRobin(RoutingPolicy):
    """Round robin over the cores."""

    def __init__(self, config: EngineConfig, loads: CoreLoads, num_cores: int) -> None:
        super().__init__(config, loads, num_cores)
        self._next = 0

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        core = min(cores, key=lambda core: (core - self._next) % self._num_cores)
        self._next = core + 1
        return core


class LeastLoaded(RoutingPolicy):
    """Core with the fewest sequences, then with the fewest waiting tokens, then the first."""

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        of = self.loads.of
        return min(
            cores,
            key=lambda core: (of(core, LoadCounter.SEQUENCES), of(core, LoadCounter.WAITING_TOKENS), core),
        )


class LongestPrefix(RoutingPolicy):
    """Core on which the prompt is computed first.

    That is the one with the fewest tokens to compute: of waiting prompts, and of this one, less the prefix that the
    core has cached, by its reports or because prompts with it were sent there. So a conversation stays with its
    earlier turns, as long as recomputing them takes longer than waiting, and popular prefixes spread by themselves.
    Ties go to the core given by the prompt's first tokens, so that all front ends agree.
    """

    def __init__(self, config: EngineConfig, loads: CoreLoads, num_cores: int) -> None:
        super().__init__(config, loads, num_cores)
        self._block_size = config.cache.block_size
        self._prefixes = [CachedPrefixes(0) for _ in range(num_cores)]
        self._adapters = [self._no_adapters() for _ in range(num_cores)]
        self._num_slots = [0] * num_cores

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        blocks, first = request.blocks(self._block_size), max(HOME_PREFIX_TOKENS // self._block_size, 1)
        home = blocks[first - 1] if len(blocks) >= first else 0
        return min(cores, key=lambda core: (self.cost(request, core), (core - home) % self._num_cores))

    def cost(self, request: RoutedRequest, core: int) -> float:
        """Return the time until this core has computed the prompt, in tokens."""
        queued_cost = SEQUENCE_TOKENS * self.loads.of(core, LoadCounter.SEQUENCES)
        waiting = self.loads.of(core, LoadCounter.WAITING_TOKENS)
        adapter = request.keys.adapter
        loading = ADAPTER_TOKENS if adapter is not None and adapter not in self._adapters[core] else 0
        return (
            self.num_uncached(request, core) + waiting + queued_cost + loading + self._lacking(request, core)
        )

    def num_uncached(self, request: RoutedRequest, core: int) -> int:
        """Return the uncached tokens; the last token is always computed."""
        num_cached = self._prefixes[core].num_known(request.blocks(self._block_size)) * self._block_size
        return max(len(request.token_ids) - num_cached, 1)

    def sent(self, request: RoutedRequest, core: int) -> None:
        self._prefixes[core].use(request.blocks(self._block_size))
        if request.keys.adapter is not None:
            self._adapters[core].use([request.keys.adapter])

    def ready(self, core: int, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_slots[core] = num_blocks * block_size
        num_found = num_blocks if self._config.cache.enable_prefix_caching else 0
        self._prefixes[core] = CachedPrefixes(min(num_found, MAX_BLOCKS))
        self._adapters[core] = self._no_adapters()

    def cached(self, core: int, delta: CacheDelta) -> None:
        self._prefixes[core].apply(delta)

    def _lacking(self, request: RoutedRequest, core: int) -> float:
        """Return the tokens that do not fit the KV cache before other requests end."""
        free = self._num_slots[core] * (1.0 - self.loads.of(core, LoadCounter.KV_USE))
        return max(len(request.token_ids) - free, 0.0) if self._num_slots[core] else 0.0

    def _no_adapters(self) -> LruSet[str]:
        return LruSet(self._config.num_kept_adapters)


POLICIES: dict[str, type[RoutingPolicy]] = {
    "prefix": LongestPrefix,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}  # --routing-policy -> policy


@dataclass
class _Sent:
    """Route of a request, and the prompt tokens still counted there."""

    request: RoutedRequest
    first_id: str
    core: int = 0
    num_waiting: int = 0


class CoreLoads:
    """Loads of `num_cores` cores.

    Args:
        slot: slot of shared counters of that size; None: there are no other front ends.
    """

    def __init__(self, num_cores: int, slot: CounterSlot | None = None) -> None:
        self._slot = slot or SharedCounters(1, num_cores=num_cores).slot(0)

    def of(self, core: int, load: LoadCounter) -> float:
        """Return the total over all front ends."""
        return self._slot.total(self._slot.counters.load_column(core, load))

    def add(self, core: int, load: LoadCounter, amount: float) -> None:
        self._slot.add(self._slot.counters.load_column(core, load), amount)

    def put(self, core: int, load: LoadCounter, value: float) -> None:
        """Set this front end's value."""
        self._slot.put(self._slot.counters.load_column(core, load), value)


class Router(CoreChoice):
    """Router by `--routing-policy`; with one core it costs next to nothing."""

    def __init__(self, config: EngineConfig, num_cores: int) -> None:
        self._block_size = config.cache.block_size
        name = config.parallel.routing_policy if num_cores > 1 else "round_robin"
        self._policy = POLICIES[name](config, CoreLoads(num_cores), num_cores)
        self._num_cores = num_cores
        self._sent: dict[str, _Sent] = {}
        self._awaiting_update: dict[str, str] = {}

    def share(self, slot: CounterSlot) -> None:
        """Share loads with the other front ends of the cores; call before there are requests."""
        self._policy.loads = CoreLoads(self._num_cores, slot)

    def admit(
        self,
        name: str,
        token_ids: list[int],
        num_sequences: int,
        keys: ExtraKeys,
        first_id: str,
        cores: Sequence[int],
    ) -> int:
        return self.route(name, RoutedRequest(token_ids, num_sequences, keys), first_id, cores)

    def route(self, name: str, request: RoutedRequest, first_id: str, cores: Sequence[int]) -> int:
        """Return one of these cores for a new request, whose first sequence has this core id."""
        self._sent[name] = _Sent(request, first_id)
        return self._send(name, cores)

    def move(self, name: str, cores: Sequence[int]) -> int:
        """Return another core for a request whose own is gone; its prompt is computed again."""
        self._count(self._sent[name], -1)
        return self._send(name, cores)

    def mark_updated(self, core_ids: Iterable[str]) -> None:
        """Record the first updates of these sequences."""
        for core_id in core_ids if self._awaiting_update else ():
            if (name := self._awaiting_update.pop(core_id, None)) is not None:
                self._stop_waiting(self._sent[name])

    def finish(self, name: str) -> None:
        """Remove a finished request."""
        sent = self._sent.pop(name)
        self._awaiting_update.pop(sent.first_id, None)
        self._count(sent, -1)

    def ready(self, core: int, num_blocks: int, block_size: int | None = None) -> None:
        """Record that a core has loaded, with `num_blocks` blocks of `block_size` tokens; None: as configured."""
        self._policy.ready(core, num_blocks, block_size or self._block_size)

    def lost(self, core: int) -> None:
        """Record the loss of a core and of its cache."""
        self.ready(core, 0)
        self._policy.loads.put(core, LoadCounter.KV_USE, 0.0)

    def observe(self, core: int, stats: SchedulerStats) -> None:
        """Record a core's statistics."""
        self._policy.loads.put(core, LoadCounter.KV_USE, stats.kv_cache_usage)

    def cached(self, core: int, delta: CacheDelta) -> None:
        """Apply a core's prefix cache delta."""
        self._policy.cached(core, delta)

    def _send(self, name: str, cores: Sequence[int]) -> int:
        sent = self._sent[name]
        request = sent.request
        sent.core = core = self._policy.choose(request, cores)
        sent.num_waiting = self._policy.num_uncached(request, core)
        self._policy.sent(request, core)
        self._awaiting_update[sent.first_id] = name
        self._count(sent, 1)
        return core

    def _count(self, sent: _Sent, sign: int) -> None:
        self._policy.loads.add(sent.core, LoadCounter.SEQUENCES, sign * sent.request.num_sequences)
        self._policy.loads.add(sent.core, LoadCounter.WAITING_TOKENS, sign * sent.num_waiting)

    def _stop_waiting(self, sent: _Sent) -> None:
        self._policy.loads.add(sent.core, LoadCounter.WAITING_TOKENS, -sent.num_waiting)
        sent.num_waiting = 0
