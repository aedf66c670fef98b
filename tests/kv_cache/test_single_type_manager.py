# SPDX-License-Identifier: Apache-2.0
"""Each kind of manager against brute force: what must be retained, and hits recomputed from scratch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.block_pool import DevicePool
from quire.kv_cache.integrity import check_integrity
from quire.kv_cache.managers import MANAGERS
from quire.kv_cache.spec import (
    NULL_BLOCK_ID,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)

derandomized = settings(derandomize=True, deadline=None, max_examples=150)
SIZES = {"num_kv_heads": 1, "head_size": 8, "dtype_bytes": 4}
small = st.integers(1, 9)
attention_specs = st.one_of(
    st.builds(FullAttentionSpec, st.integers(1, 5), **{k: st.just(v) for k, v in SIZES.items()}),
    st.builds(SlidingWindowSpec, st.integers(1, 5), *map(st.just, SIZES.values()), sliding_window=small),
    st.builds(ChunkedLocalSpec, st.integers(1, 5), *map(st.just, SIZES.values()), attention_chunk=small),
)
recurrent_specs = st.builds(
    RecurrentStateSpec, st.integers(1, 5), state_bytes=st.just(64), checkpoint_blocks=st.integers(1, 3)
)
all_specs = attention_specs | recurrent_specs


def reads(spec: KVCacheSpec, position: int) -> set[int]:
    """The positions that the token at `position` reads, one by one from the definition of each kind."""
    if isinstance(spec, SlidingWindowSpec):
        return {j for j in range(position + 1) if position - j < spec.sliding_window}
    if isinstance(spec, ChunkedLocalSpec):
        chunk = spec.attention_chunk
        return {j for j in range(position + 1) if j // chunk == position // chunk}
    if isinstance(spec, RecurrentStateSpec):
        return {position - 1} if position else set()
    return set(range(position + 1))


def needed_blocks(spec: KVCacheSpec, num_computed_tokens: int, horizon: int = 60) -> set[int]:
    """Blocks of the computed tokens that this or any later token reads."""
    later = range(num_computed_tokens, num_computed_tokens + horizon)
    positions = set().union(*(reads(spec, position) for position in later))
    return {j // spec.block_size for j in positions if j < num_computed_tokens}


def names(num_blocks: int, salt: int = 0) -> list[bytes]:
    return [bytes([salt]) * 16 + i.to_bytes(16, "big") for i in range(num_blocks)]


def make(spec: KVCacheSpec, num_blocks: int = 200, max_chunk: int = 12):
    pool = DevicePool(num_blocks)
    return pool, MANAGERS[type(spec)](spec, pool, 0, max_chunk)


def start(pool, manager, name, hit):
    """Adopt a hit of full blocks."""
    manager.adopt(name, len(hit) * manager.block_size, hit, *pool.take([hit], num_full=len(hit)))


chunk_lists = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@derandomized
@given(all_specs, chunk_lists, st.booleans())
def test_exactly_the_blocks_that_are_still_read_are_held(spec, chunks, caching):
    """And never more than `max_blocks`, which admission counts with."""
    pool, manager = make(spec)
    manager.adopt("a", 0, [], [])
    computed = 0
    for chunk in chunks:
        manager.drop("a", computed, cached_only=False)
        needed = manager.num_blocks_to_grow("a", computed + chunk)
        free = pool.num_free_blocks
        manager.allocate("a", computed + chunk)
        assert free - pool.num_free_blocks == needed
        held = {i for i, block in enumerate(manager.tables["a"]) if block.block_id != NULL_BLOCK_ID}
        assert len(held) <= manager.max_blocks(computed + chunk)
        written = set(range(computed // spec.block_size, (computed + chunk - 1) // spec.block_size + 1))
        assert held >= needed_blocks(spec, computed)
        if isinstance(spec, RecurrentStateSpec):
            assert max(written) in held
            assert held <= needed_blocks(spec, computed) | written
        else:
            assert held == needed_blocks(spec, computed) | written
        computed += chunk
        if caching:
            manager.cache_blocks("a", names(120), computed // spec.block_size)
        check_integrity(pool, [manager])
    pool.free([block for block in manager.forget("a") if block.block_id != NULL_BLOCK_ID])
    check_integrity(pool, [manager])
    assert pool.num_free_blocks == pool.num_usable_blocks


@derandomized
@given(all_specs, st.sets(st.integers(0, 14)), st.integers(0, 70))
def test_hit_is_the_longest_with_all_reads_cached(spec, cached, max_num_tokens):
    pool, manager = make(spec)
    keys = names(15)
    blocks = pool.get_new_blocks(15)
    pool.cache_full_blocks([blocks[i] for i in cached], [manager._key(keys[i]) for i in cached])
    hit = manager.find_longest_cache_hit(keys, max_num_tokens, pool.get_cached_block)
    longest = min(max_num_tokens // spec.block_size, 15)
    servable = [n for n in range(longest + 1) if needed_blocks(spec, n * spec.block_size) <= cached]
    assert len(hit) == max(servable)
    needed = needed_blocks(spec, len(hit) * spec.block_size)
    null = pool.blocks[NULL_BLOCK_ID]
    assert hit == [blocks[i] if i in needed else null for i in range(len(hit))]


@derandomized
@given(all_specs, st.integers(1, 40), st.lists(st.integers(1, 12), min_size=40), st.data())
def test_blocks_to_start_suffice_to_the_end(spec, num_tokens, chunks, data):
    """With just so many free blocks, every chunk of the known tokens finds room, whatever the hit and its holders."""
    pool, manager = make(spec)
    keys = names(10)
    owned = pool.get_new_blocks(10)
    pool.cache_full_blocks(owned, [manager._key(key) for key in keys])
    pool.free([block for block in owned if data.draw(st.booleans())])
    hit = manager.find_longest_cache_hit(keys, num_tokens - 1, pool.get_cached_block)
    needed = manager.num_blocks_to_start(num_tokens, hit, len(hit) * spec.block_size)
    revived = [block for block in hit if block.block_id != NULL_BLOCK_ID and block.ref_cnt == 0]
    start(pool, manager, "a", hit)
    pool.get_new_blocks(pool.num_free_blocks - (needed - len(revived)))
    computed = len(hit) * spec.block_size
    for chunk in chunks:
        end = min(computed + chunk, num_tokens)
        manager.drop("a", computed, cached_only=False)
        manager.allocate("a", end)  # asserts that the blocks are there
        computed = end


@derandomized
@given(all_specs, st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_sparing_the_uncached_drops_them_once_they_are_cached(spec, chunks):
    pool, manager = make(spec)
    manager.adopt("a", 0, [], [])
    computed = 0
    for chunk in chunks:
        manager.drop("a", computed, cached_only=True)
        assert manager.num_dropped["a"] <= computed // spec.block_size
        manager.allocate("a", computed + chunk)
        manager.drop("a", computed, cached_only=True)  # the step has not come back: its blocks stay
        held = {i for i, block in enumerate(manager.tables["a"]) if block.block_id != NULL_BLOCK_ID}
        computed += chunk
        manager.cache_blocks("a", names(120), computed // spec.block_size)
        assert all(
            pool.get_cached_block(manager._key(names(120)[i]))
            for i in held
            if (i + 1) * spec.block_size <= computed
        )
        check_integrity(pool, [manager])


class Mamba:
    """A recurrence over a manager's blocks: the state is a number that every token enters, in order."""

    def __init__(self, spec: RecurrentStateSpec) -> None:
        self.spec = spec
        self.states: dict[int, int] = {}

    @staticmethod
    def advance(state: int, token_id: int) -> int:
        return (state * 1_000_003 + token_id + 1) % 2**61

    def run(self, table: list[int], token_ids: list[int], start: int, end: int) -> int:
        """Compute tokens `start` to `end` as the docstring of `RecurrentStateSpec` says; returns the state."""
        size = self.spec.block_size
        state = self.states[table[(start - 1) // size]] if start else 0
        for position in range(start, end):
            state = self.advance(state, token_ids[position])
            block_id = table[position // size]
            if ((position + 1) % size == 0 or position == end - 1) and block_id != NULL_BLOCK_ID:
                self.states[block_id] = state
        return state


@derandomized
@given(recurrent_specs, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1), st.data())
def test_recurrent_model_resumes_from_cached_states(spec, prompts, data):
    """Prompts of few different tokens, in any chunks, in a pool that has to evict: each ends in its own state."""
    from quire.kv_cache.hashing import ExtraKeys, extend_hashes

    pool, manager = make(spec, num_blocks=12)
    model = Mamba(spec)
    for number, token_ids in enumerate(prompts):
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, spec.block_size, ExtraKeys(cache_salt=None))
        hit = manager.find_longest_cache_hit(hashes, len(token_ids) - 1, pool.get_cached_block)
        name, computed = f"r{number}", len(hit) * spec.block_size
        start(pool, manager, name, hit)
        while computed < len(token_ids):
            end = min(computed + data.draw(st.integers(1, 6)), len(token_ids))
            manager.drop(name, computed, cached_only=False)
            manager.allocate(name, end)
            state = model.run([block.block_id for block in manager.tables[name]], token_ids, computed, end)
            computed = end
            manager.cache_blocks(name, hashes, computed // spec.block_size)
            check_integrity(pool, [manager])
        expected = 0
        for token_id in token_ids:
            expected = model.advance(expected, token_id)
        assert state == expected
        pool.free([block for block in manager.forget(name) if block.block_id != NULL_BLOCK_ID])


def test_a_long_sequence_of_states_holds_few_blocks():
    spec = RecurrentStateSpec(4, state_bytes=64, checkpoint_blocks=8)
    pool, manager = make(spec, max_chunk=1)
    manager.adopt("a", 0, [], [])
    for position in range(400):
        manager.drop("a", position, cached_only=False)
        manager.allocate("a", position + 1)
        assert pool.num_usable_blocks - pool.num_free_blocks <= 2
