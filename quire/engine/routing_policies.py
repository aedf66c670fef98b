"""Routing policies: which core gets a request, where there are several.

Invariant: pure. Equals are told apart by the request alone, so the same requests under the same loads go the same ways.
Costs are in tokens of prompts that would have to be computed first, or anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.config import EngineConfig
from quire.engine.cache_news import CacheNews, keys_of
from quire.engine.ledger import Load
from quire.engine.loads import Loads
from quire.engine.recent import CachedPrefixes, Recent
from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes

SEQUENCE_TOKENS = 48
"""What a sequence in flight costs one that comes beside it: each of its tokens makes the other's steps longer."""
ADAPTER_TOKENS = 512
"""What it costs to read an adapter that a core does not have."""
PIECE_TOKENS = 64
"""Prompts that begin with the same so many tokens have one home, if they are as good anywhere."""
MAX_BLOCKS = 1 << 18
"""So many blocks that were sent to a core are remembered at most, in some 40 MB."""


@dataclass(frozen=True)
class RoutedRequest:
    """What of a request may decide where it goes."""

    token_ids: list[int]
    num_sequences: int
    keys: ExtraKeys

    def blocks(self, block_size: int) -> list[int]:
        """The full blocks of its prompt, as caches with such blocks know them."""
        if block_size not in self._blocks:
            hashes: list[BlockHash] = []
            extend_hashes(hashes, self.token_ids, block_size, self.keys)
            self._blocks[block_size] = keys_of(hashes)
        return self._blocks[block_size]

    @cached_property
    def _blocks(self) -> dict[int, list[int]]:
        return {}


class RoutingPolicy(ABC):
    """Chooses among cores by what they have to do.

    Attributes:
        loads: of all cores.
    """

    def __init__(self, config: EngineConfig, loads: Loads, num_cores: int) -> None:
        self.loads = loads
        self._config = config
        self._num_cores = num_cores

    @abstractmethod
    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        """One of these."""

    def num_uncached(self, request: RoutedRequest, core: int) -> int:
        """Tokens of the prompt that this core is expected to compute."""
        return len(request.token_ids)

    def sent(self, request: RoutedRequest, core: int) -> None:  # noqa: B027
        """That is where it goes."""

    def ready(self, core: int, num_blocks: int, block_size: int) -> None:  # noqa: B027
        """A new core is there, whose KV cache has so many blocks, of so many tokens each, and nothing in them."""

    def cached(self, core: int, news: CacheNews) -> None:  # noqa: B027
        """A core tells of its cache."""


class RoundRobin(RoutingPolicy):
    """Each core in its turn."""

    def __init__(self, config: EngineConfig, loads: Loads, num_cores: int) -> None:
        super().__init__(config, loads, num_cores)
        self._next = 0

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        core = min(cores, key=lambda core: (core - self._next) % self._num_cores)
        self._next = core + 1
        return core


class LeastLoaded(RoutingPolicy):
    """The core that has the fewest sequences; of several the one with the fewest tokens that wait, then the first."""

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        of = self.loads.of
        return min(cores, key=lambda core: (of(core, Load.SEQUENCES), of(core, Load.WAITING_TOKENS), core))


class LongestPrefix(RoutingPolicy):
    """The core on which the prompt is computed first.

    That is the one with the fewest tokens to compute: of prompts that wait, and of this one, less the prefix that the
    core has in its cache, as it tells, or will have, because prompts with it went there. So a conversation stays where
    its turns before were, as long as computing them anew takes longer than waiting; and what many ask for spreads by
    itself.
    A prompt that is as good anywhere goes where its first piece says, so that all front ends agree.
    """

    def __init__(self, config: EngineConfig, loads: Loads, num_cores: int) -> None:
        super().__init__(config, loads, num_cores)
        self._block_size = config.cache.block_size
        self._prefixes = [CachedPrefixes(0) for _ in range(num_cores)]
        self._adapters = [self._no_adapters() for _ in range(num_cores)]
        self._num_slots = [0] * num_cores

    def choose(self, request: RoutedRequest, cores: Sequence[int]) -> int:
        blocks, first = request.blocks(self._block_size), max(PIECE_TOKENS // self._block_size, 1)
        home = blocks[first - 1] if len(blocks) >= first else 0
        return min(cores, key=lambda core: (self.cost(request, core), (core - home) % self._num_cores))

    def cost(self, request: RoutedRequest, core: int) -> float:
        """Tokens' worth of time until this core has computed the prompt."""
        in_the_way = SEQUENCE_TOKENS * self.loads.of(core, Load.SEQUENCES)
        waiting = self.loads.of(core, Load.WAITING_TOKENS)
        adapter = request.keys.adapter
        reading = ADAPTER_TOKENS if adapter is not None and adapter not in self._adapters[core] else 0
        return (
            self.num_uncached(request, core) + waiting + in_the_way + reading + self._lacking(request, core)
        )

    def num_uncached(self, request: RoutedRequest, core: int) -> int:
        """The last token is always computed."""
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

    def cached(self, core: int, news: CacheNews) -> None:
        self._prefixes[core].take_in(news)

    def _lacking(self, request: RoutedRequest, core: int) -> float:
        """Tokens for which there is no room in the KV cache, before others end."""
        free = self._num_slots[core] * (1.0 - self.loads.of(core, Load.KV_USE))
        return max(len(request.token_ids) - free, 0.0) if self._num_slots[core] else 0.0

    def _no_adapters(self) -> Recent[str]:
        return Recent(self._config.lora.num_kept)


POLICIES: dict[str, type[RoutingPolicy]] = {
    "prefix": LongestPrefix,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
"""By the names of `--routing-policy`."""
