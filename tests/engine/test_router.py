# SPDX-License-Identifier: Apache-2.0
"""Tests of the choice of a core for each request, and of the load counters behind it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.messages import CacheDelta
from quire.engine.shared_counters import LoadCounter, SharedCounters
from quire.kv_cache.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored
from quire.kv_cache.hashing import ExtraKeys, extend_hashes
from quire.routing.cache_deltas import CacheDeltaBuffer
from quire.routing.router import (
    ADAPTER_TOKENS,
    HOME_PREFIX_TOKENS,
    SEQUENCE_TOKENS,
    CachedPrefixes,
    LruSet,
    RoutedRequest,
    Router,
)
from quire.scheduler.output import SchedulerStats

NUM_CORES = 3
BLOCK_SIZE = EngineConfig.from_args().cache.block_size


def prompt(*pieces: int, tail: int = 1) -> list[int]:
    """One of such pieces, and a few tokens behind them."""
    return [token for piece in pieces for token in (piece,) * HOME_PREFIX_TOKENS] + [7] * tail


def routed(token_ids: list[int], num_sequences: int = 1, keys: ExtraKeys = ExtraKeys(None)) -> RoutedRequest:  # noqa: B008
    return RoutedRequest(token_ids, num_sequences, keys)


def with_adapter(token_ids: list[int], adapter: str) -> RoutedRequest:
    return routed(token_ids, keys=ExtraKeys(None, adapter))


class Routers:
    """A router with cores that have loaded, and requests that are numbered."""

    def __init__(self, num_cores: int = NUM_CORES, num_blocks: int = 1000, **args: Any) -> None:
        self.router = Router(EngineConfig.from_args(**args), num_cores)
        self.cores = list(range(num_cores))
        self.num_sent = 0
        for core in self.cores:
            self.router.ready(core, num_blocks)

    def send(self, request: RoutedRequest | list[int], cores: list[int] | None = None) -> int:
        name = f"r{self.num_sent}"
        self.num_sent += 1
        request = request if isinstance(request, RoutedRequest) else routed(request)
        return self.router.route(name, request, f"{name}.0", self.cores if cores is None else cores)

    def load(self, core: int, load: LoadCounter) -> float:
        return self.router._policy.loads.of(core, load)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 5), st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=20))
def test_recent_keys_are_those_of_the_last_uses(max_keys: int, uses: list[list[int]]) -> None:
    recent: LruSet[int] = LruSet(max_keys)
    order: list[int] = []
    for keys in uses:
        recent.use(keys)
        for key in keys:
            order = [other for other in order if other != key] + [key]
    kept = order[len(order) - min(max_keys, len(order)) :]
    assert [key for key in range(10) if key in recent] == sorted(kept)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 12), st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30))
def test_the_known_prefix_is_that_of_a_search_from_the_start(
    max_blocks: int, prompts: list[list[int]]
) -> None:
    prefixes = CachedPrefixes(max_blocks)
    for pieces in prompts:
        blocks = routed(prompt(*pieces)).blocks(HOME_PREFIX_TOKENS)
        in_order = [block in prefixes for block in blocks]
        assert in_order == sorted(in_order, reverse=True), "a block is there without one before it"
        assert prefixes.num_known(blocks) == sum(in_order)
        prefixes.use(blocks)
        assert prefixes.num_known(blocks) == min(len(blocks), max_blocks)
        assert len(prefixes._sent) <= max_blocks


def test_reported_cache_blocks_count_until_removed() -> None:
    """Cached blocks reported by a core count for prompts sent by other front ends too, and removed blocks no longer."""
    routers = Routers(num_cores=2)
    ids, policy = prompt(*range(20)), routers.router._policy
    hashes: list[bytes] = []
    extend_hashes(hashes, ids, BLOCK_SIZE, ExtraKeys(None))
    home = routers.send(ids)
    routers.router.finish("r0")
    stored = BlockStored([*hashes], None, ids, BLOCK_SIZE, None, DEVICE, None, None, 0)
    notes = CacheDeltaBuffer()
    notes.note([stored])
    routers.router.cached(1 - home, told(notes))
    assert [policy.num_uncached(routed(ids), core) for core in (0, 1)] == [1, 1]
    notes.note([BlockRemoved([*hashes[5:]], DEVICE, 0)])
    routers.router.cached(home, told(notes))
    assert policy.num_uncached(routed(ids), home) == len(ids) - 5 * BLOCK_SIZE
    assert routers.send(ids) == 1 - home
    notes.note([stored, AllBlocksCleared()])
    routers.router.cached(1 - home, told(notes))
    routers.router.ready(home, 1000)
    assert policy.num_uncached(routed(ids), home) == len(ids)


def told(notes: CacheDeltaBuffer) -> CacheDelta:
    """The news, which there are, over the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(notes.take()), type=CacheDelta)


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_loaded"])
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_router_counts_requests_in_flight(policy: str, data: st.DataObject) -> None:
    routers = Routers(routing_policy=policy)
    router, in_flight, unheard = routers.router, dict[str, tuple[int, int]](), set[str]()
    for _ in range(data.draw(st.integers(0, 30))):
        verb = data.draw(st.sampled_from(["send", "hear", "end", "move"]))
        if verb == "send":
            num = data.draw(st.integers(1, 3))
            name = f"r{routers.num_sent}"
            core = routers.send(routed(prompt(*data.draw(st.lists(st.integers(0, 2), max_size=3))), num))
            in_flight[name] = core, num
            unheard.add(name)
        elif in_flight:
            name = data.draw(st.sampled_from(sorted(in_flight)))
            if verb == "hear":
                router.mark_updated([f"{name}.0", "nobody"])
                unheard.discard(name)
            elif verb == "end":
                router.finish(name)
                del in_flight[name]
                unheard.discard(name)
            else:
                others = [core for core in routers.cores if core != in_flight[name][0]]
                in_flight[name] = router.move(name, others), in_flight[name][1]
                assert in_flight[name][0] in others
                unheard.add(name)
        for core in routers.cores:
            assert routers.load(core, LoadCounter.SEQUENCES) == sum(
                n for at, n in in_flight.values() if at == core
            )
            waits = any(in_flight[name][0] == core for name in unheard)
            assert (routers.load(core, LoadCounter.WAITING_TOKENS) > 0) == waits


def test_prompts_follow_their_prefix_until_recomputing_is_faster() -> None:
    routers = Routers(num_cores=2)
    long = list(range(1, 41))
    first = routers.send(prompt(*long))
    routers.router.mark_updated(["r0.0"])
    sent = 1
    while routers.send(prompt(*long, sent + 100)) == first:
        routers.router.mark_updated([f"r{sent}.0"])
        sent += 1
    saved = len(long) * HOME_PREFIX_TOKENS
    assert saved / SEQUENCE_TOKENS <= sent <= saved / SEQUENCE_TOKENS + 1
    routers.router.mark_updated([f"r{sent}.0"])
    assert routers.send(prompt(*long, 99)) != first, "now it is there, too, where less is to do"


def test_prompt_with_equal_cores_goes_where_all_routers_agree() -> None:
    rng, homes = random.Random(0), set()
    for _ in range(20):
        ids = prompt(*(rng.randrange(100) for _ in range(5)))
        (home,) = {Routers().send(ids) for _ in range(3)}
        homes.add(home)
        others = [core for core in range(NUM_CORES) if core != home]
        assert Routers().send(ids, others) in others
    assert homes == {0, 1, 2}
    assert Routers().send([1]) == 0


def test_salts_and_adapters_separate_prefixes_and_adapters_stay() -> None:
    routers = Routers(num_cores=2, enable_lora=True, max_loras=1)
    ids = prompt(*range(200))
    home = routers.send(ids)
    routers.router.finish("r0")
    assert routers.router._policy.num_uncached(routed(ids), home) == 1
    for keys in (ExtraKeys("salt"), ExtraKeys(None, "1:a")):
        assert routers.router._policy.num_uncached(routed(ids, keys=keys), home) == len(ids)
    first = routers.send(with_adapter([1], "1:a"))
    assert ADAPTER_TOKENS > SEQUENCE_TOKENS
    assert routers.send(with_adapter([2], "1:a")) == first
    second = routers.send(with_adapter([1], "2:b"))
    assert second != first, "it has less to do, and neither has the adapter"
    assert routers.send(with_adapter([2], "2:b")) == second
    routers.router.ready(second, 1000)
    routers.router.finish("r1")
    assert routers.send(with_adapter([2], "2:b")) == first, "nobody has it, and there is less to do"


def test_full_cache_is_avoided_and_a_lost_core_is_forgotten() -> None:
    routers = Routers(num_cores=2, num_blocks=100)
    ids = prompt(*range(20))
    home = routers.send(ids)
    routers.router.finish("r0")
    assert routers.send(ids) == home
    routers.router.finish("r1")
    routers.router.observe(home, SchedulerStats(kv_cache_usage=1.0))
    assert routers.send(prompt(*range(20), 5, tail=3)) != home
    routers.router.finish("r2")
    routers.router.lost(1 - home)
    routers.router.ready(1 - home, 100)
    routers.router.observe(home, SchedulerStats(kv_cache_usage=0.0))
    assert routers.router._policy.num_uncached(routed(ids), 1 - home) == len(ids)
    assert routers.send(ids) == home


def test_without_a_prefix_cache_only_the_load_counts() -> None:
    routers = Routers(num_cores=2, enable_prefix_caching=False)
    ids = prompt(*range(20))
    first = routers.send(ids)
    assert routers.send(ids) == 1 - first
    assert routers.router._policy.num_uncached(routed(ids), first) == len(ids)


def test_round_robin_takes_turns_among_those_that_are_there() -> None:
    routers = Routers(routing_policy="round_robin")
    assert [routers.send([1]) for _ in range(4)] == [0, 1, 2, 0]
    assert [routers.send([1], [0, 2]) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_has_fewest_sequences_then_waiting_tokens() -> None:
    routers = Routers(routing_policy="least_loaded")
    sizes = [(50, 2), (5, 1), (9, 1), (3, 1), (1, 1), (1, 1)]
    assert [routers.send(routed([1] * length, num)) for length, num in sizes] == [0, 1, 2, 1, 2, 1]
    assert routers.router._policy.loads.of(0, LoadCounter.WAITING_TOKENS) == 50


def test_front_ends_share_loads_and_a_lost_one_has_none() -> None:
    ledger = SharedCounters(2, num_tenants=3, num_cores=2)
    one, other = Routers(2, routing_policy="least_loaded"), Routers(2, routing_policy="least_loaded")
    for page, routers in enumerate((one, other)):
        routers.router.share(ledger.slot(page))
    assert [one.send([1]), other.send([1]), other.send([1]), one.send([1])] == [0, 1, 0, 1]
    ledger.clear(1)
    assert [one.load(core, LoadCounter.SEQUENCES) for core in range(2)] == [1, 1]
    one.router.observe(1, SchedulerStats(kv_cache_usage=0.5))
    assert other.load(1, LoadCounter.KV_USE) == 0.5


def test_single_core_is_chosen_without_hashing_the_prompt() -> None:
    routers = Routers(num_cores=1)
    request = routed(prompt(*range(50)))
    assert routers.send(request) == 0
    assert "_blocks" not in vars(request)
