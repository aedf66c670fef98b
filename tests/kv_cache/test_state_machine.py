# SPDX-License-Identifier: Apache-2.0
"""Random plans against the whole KV cache, prefixes, host tier and forks, beside a model that knows every token.

What is read, found, swapped and evicted is compared with `tests.kv_cache.reference_model`, and every invariant of
`quire.kv_cache.integrity` is checked, after each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.internal.conjecture.engine
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.kv_cache.hashing import HASH_BYTES
from quire.kv_cache.manager import KVCacheManager, PrefixHit
from quire.kv_cache.spec import KVCacheConfig, KVCacheGroup, RecurrentStateSpec
from tests.kv_cache.reference_model import EvictionOrder, Memory, PrefixNames, Tokens
from tests.scheduler.harness import make_spec

KINDS = [
    ("full",),
    ("full", "full"),
    ("window 6",),
    ("full", "window 5"),
    ("full", "window 1", "chunk 6"),
    ("chunk 8",),
    ("state 1",),
    ("full", "state 2"),
]
STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7], [0] * 16, [1, 2, 3, 4, 5, 6, 0, 0, 1])
MAX_CHUNK = 9
MAX_TOKENS = 40
MAX_IN_FLIGHT = 3

prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.sampled_from([16, 12, 9, 8, 4, 1]),
    st.lists(st.integers(0, 3), max_size=6),
)
operations = st.tuples(
    st.sampled_from(["grow", "grow", "grow", "begin", "begin", "resume", "fork", "preempt", "preempt"]),
    st.integers(0, 30),
    st.integers(1, MAX_CHUNK),
    prompts,
    st.sampled_from([None, None, "salt"]),
)


class KVCacheMachine(RuleBasedStateMachine):
    """Sequences start, grow, fork, are preempted and end, in plans whose results come back later.

    Attributes:
        seen: counts of all machines so far, which say what was really tried.
    """

    seen: Counter[str] = Counter()

    @initialize(
        kinds=st.sampled_from(KINDS),
        block_size=st.sampled_from([1, 3, 4]),
        num_blocks=st.sampled_from([12, 16, 25, 60]),
        num_host_blocks=st.sampled_from([0, 4, 8, 15, 300]),
        mode=st.sampled_from(["swap", "swap", "recompute"]),
        caching=st.sampled_from([True, True, False]),
    )
    def make(self, kinds, block_size, num_blocks, num_host_blocks, mode, caching):
        self.specs = [make_spec(kind, block_size) for kind in kinds]
        layers = {f"layers.{i}": spec for i, spec in enumerate(self.specs)}
        groups = tuple(KVCacheGroup((name,), spec) for name, spec in layers.items())
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, groups, layers, num_host_blocks),
            enable_prefix_caching=caching,
            max_chunk=MAX_CHUNK,
            preemption_mode=mode,
        )
        self.mode = mode
        self.caching = caching
        self.pools = (self.manager._pool, self.manager._pool.host.pool)
        self.orders = [EvictionOrder(pool) for pool in self.pools]
        self.memory, self.names = Memory(self.specs), PrefixNames(self.specs)
        self.running: dict[str, Tokens] = {}
        self.preempted: dict[str, Tokens] = {}
        self.in_flight: list[list[tuple[Tokens, int]]] = []
        self.chunks: dict[str, tuple[Tokens, list[list[int]], int, int]] = {}
        self.refreshed: set[bytes] = set()
        self.number = 0

    # What happens

    @rule(plan=st.lists(operations, min_size=1, max_size=6))
    def plan(self, plan):
        """Operations, then the plan's copies and its forward pass; the result stays away."""
        self.chunks.clear()
        for operation, *details in plan:
            with self.watched():
                getattr(self, operation)(*details)
        with self.watched():
            moves = self.manager.pop_moves()
            self.memory.move(moves)
        self.seen.update({name: len(pairs) for name, pairs in moves._asdict().items()})
        for seq, tables, start, end in self.chunks.values():
            self.memory.compute(seq, tables, start, end)
            seq.num_in_flight += 1
        self.in_flight.append([(seq, end) for seq, _, _, end in self.chunks.values()])
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self.land(1)
        self.names.check(self.pools[0], self.memory.device)
        self.names.check(self.pools[1], self.memory.host)

    @precondition(lambda self: self.in_flight)
    @rule(count=st.integers(1, 4))
    def land(self, count):
        """The oldest results come back."""
        with self.watched():
            for seq, end in [chunk for chunks in self.in_flight[:count] for chunk in chunks]:
                seq.num_in_flight -= 1
                if self.running.get(seq.request_id) is seq:
                    self.manager.cache_blocks(seq, end)
                    self.names.learn(seq)
        del self.in_flight[:count]

    @precondition(lambda self: self.running or self.preempted)
    @rule(which=st.integers(0, 30))
    def finish(self, which):
        seq = pick(self.running | self.preempted, which)
        places = {b: i for table in self.manager.get_block_ids(seq) for i, b in enumerate(table)}
        with self.watched(places):
            self.manager.free(seq)
        self.running.pop(seq.request_id, None)
        self.preempted.pop(seq.request_id, None)

    @precondition(lambda self: self.running or self.preempted)
    @rule(which=st.integers(0, 30))
    def fail(self, which):
        """Fail a sequence: blocks computed since its first start are no longer found on either tier; the others are."""
        seq = pick(self.running | self.preempted, which)
        own = set(seq.block_hashes[seq.num_cached_tokens // self.specs[0].block_size :])
        before = [set(pool.cached_blocks) for pool in self.pools]
        forgotten = {key for keys in before for key in keys if key[:HASH_BYTES] in own}
        with self.watched(forgotten=forgotten):
            self.manager.disown(seq)
        for pool, keys in zip(self.pools, before, strict=True):
            assert set(pool.cached_blocks) == keys - forgotten
        self.manager.check_integrity()
        self.seen["forgotten"] += len(forgotten)
        self.finish(which)

    @rule(when=st.integers(0, 4))
    def reset_prefix_cache(self, when):
        """Now and then: a cache that is full has more to lose."""
        if when:
            return
        idle = not any(pool.is_held for pool in self.pools)
        assert self.manager.reset_prefix_cache() == idle
        if idle:
            assert not any(pool.cached_blocks for pool in self.pools)
            self.orders = [EvictionOrder(pool) for pool in self.pools]

    @invariant()
    def the_cache_is_whole(self):
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        while self.in_flight:
            self.land(1)
        while self.running or self.preempted:
            self.finish(0)
        assert not any(pool.is_held for pool in self.pools)
        self.manager.check_integrity()

    # Operations of a plan

    def grow(self, which, count, prompt, salt):
        idle = {name: seq for name, seq in self.running.items() if name not in self.chunks}
        if idle:
            self.advance(pick(idle, which), count)
        else:
            self.begin(which, count, prompt, salt)

    def begin(self, which, count, prompt, salt):
        seq = self.arrive(prompt, salt)
        self.start(seq, self.find_prefix(seq), count)

    def fork(self, which, count, prompt, salt):
        """Begin with some of what a running sequence has, as of before this plan."""
        if not self.running:
            return
        parent = pick(self.running, which)
        _, _, num_ready, _ = self.chunks.get(parent.request_id, (0, 0, parent.num_computed_tokens, 0))
        if num_ready == 0:
            return
        num_tokens = 1 + which % num_ready
        child = self.arrive(parent.token_ids[:num_tokens] + prompt[-2:], parent.salt)
        hit = self.manager.get_forked_blocks(parent, num_tokens)
        assert hit.num_tokens == (num_tokens if self.has_all(parent, num_tokens) else 0)
        self.seen["forks"] += self.start(child, hit if hit.num_tokens else self.find_prefix(child), count)

    def preempt(self, which, count, prompt, salt):
        idle = {name: seq for name, seq in self.running.items() if name not in self.chunks}
        if not idle:
            return
        seq = pick(idle, which)
        num_swaps, num_free = self.manager.num_swaps, self.pools[1].num_free_blocks
        tables = [manager.tables[seq.request_id] for manager in self.manager.managers]
        names = {block.block_hash for table in tables for block in table if block.block_hash is not None}
        num_held = self.manager.num_held_blocks(seq)
        self.manager.preempt(seq)
        is_swapped = self.manager.num_swaps > num_swaps
        assert is_swapped or self.mode == "recompute" or num_held > num_free
        assert not (is_swapped and self.mode == "recompute")
        if self.mode == "swap" and not is_swapped:  # what of it is on the host counts as used
            self.refreshed |= names
        seq.num_swapped_tokens = seq.num_computed_tokens if is_swapped else 0
        seq.num_computed_tokens = 0
        self.preempted[seq.request_id] = self.running.pop(seq.request_id)
        self.seen["swaps"] += is_swapped

    def resume(self, which, count, prompt, salt):
        """Come back once all that was computed is in."""
        ready = {name: seq for name, seq in self.preempted.items() if not seq.num_in_flight}
        if not ready:
            return
        seq = pick(ready, which)
        hit = self.manager.get_swapped_blocks(seq)
        assert (hit.num_tokens if hit else 0) == seq.num_swapped_tokens
        if self.start(seq, hit or self.find_prefix(seq), count):
            del self.preempted[seq.request_id]

    # Their parts

    def arrive(self, prompt: list[int], salt: str | None) -> Tokens:
        self.number += 1
        return Tokens(f"r{self.number}", list(prompt), salt)

    def find_prefix(self, seq: Tokens) -> PrefixHit:
        hit = self.manager.get_computed_blocks(seq)
        self.names.learn(seq)
        assert hit.num_tokens == (self.names.longest_hit(seq, self.pools) if self.caching else 0)
        self.seen["hits"] += hit.num_tokens > 0
        return hit

    def has_all(self, parent: Tokens, num_tokens: int) -> bool:
        """Whether a sequence has, unchanged, what the token after its first `num_tokens` reads."""
        for spec, table in zip(self.specs, self.manager.get_block_ids(parent), strict=True):
            if isinstance(spec, RecurrentStateSpec) and num_tokens % spec.block_size:
                return False
            if 0 in table[spec.first_block(num_tokens) : spec.num_blocks(num_tokens)]:
                return False
        return True

    def start(self, seq: Tokens, hit: PrefixHit, count: int) -> bool:
        """As the scheduler does it: only if there is room for all that is known, which then holds."""
        if self.manager.num_blocks_short(seq, hit) > 0:
            return False
        self.manager.start(seq, hit)
        if seq.request_id not in self.preempted:
            seq.num_cached_tokens = hit.num_tokens
        self.running[seq.request_id] = seq
        seq.num_computed_tokens = hit.num_tokens
        started = self.advance(seq, min(count, len(seq.token_ids) - hit.num_tokens))
        assert started, "the room just found is gone"
        return True

    def advance(self, seq: Tokens, count: int) -> bool:
        """Plan the next tokens, of which those that are not known yet are made up; one more is known then."""
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        if end > MAX_TOKENS or self.manager.allocate_slots(seq, count) is None:
            return False
        seq.token_ids += [(7 * start + i) % 4 for i in range(end + 1 - len(seq.token_ids))]
        seq.num_computed_tokens = end
        self.chunks[seq.request_id] = (seq, self.manager.get_block_ids(seq), start, end)
        self.seen["chunks"] += 1
        return True

    @contextmanager
    def watched(
        self, places: dict[int, int] | None = None, forgotten: frozenset[bytes] | set[bytes] = frozenset()
    ) -> Iterator[None]:
        """Check that the enclosed operations evict in order, except for blocks forgotten on purpose."""
        names = set(self.pools[0].cached_blocks)
        yield
        evicted = names - set(self.pools[0].cached_blocks)
        self.orders[0].observe(places or {}, set(), forgotten)
        self.orders[1].observe({}, evicted | self.refreshed, forgotten)
        self.refreshed.clear()
        self.seen["operations"] += 1


def pick(sequences: dict[str, Tokens], which: int) -> Tokens:
    return sequences[sorted(sequences)[which % len(sequences)]]


MAX_SHRINKING_SECONDS = 20
"""A minute or five more would make a shorter example of a failure, and nobody waits for it."""


@pytest.fixture(autouse=True)
def bounded_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis has no setting for it."""
    monkeypatch.setattr(hypothesis.internal.conjecture.engine, "MAX_SHRINKING_SECONDS", MAX_SHRINKING_SECONDS)


def options(max_examples: int) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=max_examples,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=quiet,
    )


@pytest.mark.item(55)
def test_cache_equals_a_model_by_tokens() -> None:
    """Some 11,000 operations."""
    run_state_machine_as_test(KVCacheMachine, settings=options(100))
    assert all(KVCacheMachine.seen[what] > 50 for what in ("forks", "swaps", "hits", "forgotten")), (
        KVCacheMachine.seen
    )


@pytest.mark.item(55)
@pytest.mark.more
def test_cache_equals_its_model_after_10000_operations() -> None:
    before = KVCacheMachine.seen["operations"]
    run_state_machine_as_test(KVCacheMachine, settings=options(250))
    assert KVCacheMachine.seen["operations"] - before >= 10_000


@pytest.mark.item(55)
@pytest.mark.soak
def test_at_length() -> None:
    run_state_machine_as_test(KVCacheMachine, settings=options(5000))
