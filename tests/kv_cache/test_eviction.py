# SPDX-License-Identifier: Apache-2.0
"""Tests of the eviction order: least recently used blocks first, and of a sequence the last ones first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_cache.test_manager import BLOCK, Sequence, compute, make_manager

NUM_USABLE = 6
Prefix = tuple[int, ...]


class LeastRecentlyUsed:
    """The obvious cache: every prefix of whole blocks with the time of its last use; requests come one by one."""

    def __init__(self) -> None:
        self.used: dict[Prefix, tuple[int, int]] = {}
        self._now = 0

    def compute(self, tokens: list[int]) -> int:
        """Returns the number of tokens that were cached, and leaves what is cached after the request."""
        self._now += 1
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        num_hit = next((i for i, prefix in enumerate(prefixes) if prefix not in self.used), len(prefixes))
        num_hit = min(num_hit, (len(tokens) - 1) // BLOCK)
        held = prefixes[:num_hit]
        num_new = -(-len(tokens) // BLOCK) - num_hit
        while NUM_USABLE - len(self.used) < num_new:
            del self.used[min(self.used.keys() - held, key=self.used.__getitem__)]
        for place, prefix in enumerate(prefixes):
            if place < num_hit or prefix not in self.used:
                self.used[prefix] = (self._now, -place)
        return num_hit * BLOCK


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, NUM_USABLE * BLOCK), st.integers(0, 6)), max_size=30)
)
def test_cache_equals_a_plain_lru(requests: list[tuple[int, int, int]]) -> None:
    """Prompts of few stems, which go their own way at some block: the last token's own is always computed again."""
    manager, model = make_manager(NUM_USABLE + 1), LeastRecentlyUsed()
    names: dict[bytes, Prefix] = {}
    for number, (stem, num_tokens, num_common_blocks) in enumerate(requests):
        tokens = [stem if i < num_common_blocks * BLOCK else 10 + stem for i in range(num_tokens)]
        sequence = Sequence(f"r{number}", tokens)
        assert compute(manager, sequence) == model.compute(tokens)
        manager.free(sequence)
        names |= {name: tuple(tokens[: (i + 1) * BLOCK]) for i, name in enumerate(sequence.block_hashes)}
        assert {names[key[:32]] for key in manager._pool.cached_blocks} == model.used.keys()


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    manager = make_manager()
    assert compute(manager, Sequence("a", list(range(3 * BLOCK)))) == 0
    again = Sequence("b", list(range(3 * BLOCK)))
    assert compute(manager, again) == 2 * BLOCK
    first, second = (manager.get_block_ids(s)[0] for s in (Sequence("a", []), again))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert len(manager._pool.cached_blocks) == 3
