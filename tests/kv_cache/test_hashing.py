# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.hashing import HASH_BYTES, BlockHash, ExtraKeys, MediaKey, extend_hashes

PUBLIC = ExtraKeys(cache_salt=None)
derandomized = settings(derandomize=True, deadline=None, max_examples=60)
tokens = st.lists(st.integers(0, 2**40), max_size=24)


def hashes(token_ids: list[int], block_size: int = 4, extra_keys: ExtraKeys = PUBLIC) -> list[BlockHash]:
    result: list[BlockHash] = []
    extend_hashes(result, token_ids, block_size, extra_keys)
    return result


@derandomized
@given(tokens, st.integers(1, 5), st.data())
def test_incremental_hashing_equals_hashing_at_once(token_ids, block_size, data):
    grown: list[BlockHash] = []
    for end in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))):
        extend_hashes(grown, token_ids[:end], block_size, PUBLIC)
        assert len(grown) == end // block_size
    extend_hashes(grown, token_ids, block_size, PUBLIC)
    assert grown == hashes(token_ids, block_size)


@derandomized
@given(tokens, tokens)
def test_hashes_agree_exactly_on_the_common_full_blocks(a, b):
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    agree = [x == y for x, y in zip(hashes(a), hashes(b), strict=False)]
    assert agree == [(i + 1) * 4 <= common for i in range(len(agree))]


def test_only_full_blocks_have_a_hash():
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.item(22)
def test_the_salt_separates_and_none_is_not_a_salt():
    salts = [None, "", "a", "b", "None"]
    names = {hashes([1, 2, 3, 4], extra_keys=ExtraKeys(cache_salt=salt))[0] for salt in salts}
    assert len(names) == len(salts)


def test_a_name_means_another_thing_as_a_salt_than_as_an_adapter():
    keys = [ExtraKeys("a"), ExtraKeys(None, "a"), ExtraKeys("a", "a"), ExtraKeys(None), ExtraKeys("a", "")]
    assert len({hashes([1, 2, 3, 4], extra_keys=one)[0] for one in keys}) == len(keys)


@st.composite
def extra_keys(draw):
    """Few different values, so that two draws often agree in part."""
    ends = sorted(draw(st.sets(st.integers(0, 20), max_size=6)))
    spans = zip(ends[::2], ends[1::2], strict=False)
    media = tuple(MediaKey(draw(st.sampled_from([b"", b"x", b"xy"])), start, end) for start, end in spans)
    names = st.sampled_from([None, "", "a"])
    return ExtraKeys(draw(names), draw(names), media)


@derandomized
@given(extra_keys(), extra_keys(), st.lists(st.integers(0, 1), min_size=20, max_size=20), st.integers(1, 6))
def test_hashes_agree_exactly_where_the_keys_up_to_there_do(a, b, token_ids, block_size):
    """Salt and adapter in every block; an item of media from the first block that holds a part of it."""
    pairs = zip(hashes(token_ids, block_size, a), hashes(token_ids, block_size, b), strict=True)
    for place, (mine, other) in enumerate(pairs):
        end = (place + 1) * block_size
        known = [(k.cache_salt, k.adapter, [m for m in k.media if m.start < end]) for k in (a, b)]
        assert (mine == other) == (known[0] == known[1])


def test_media_are_keys_of_the_blocks_that_hold_them_only():
    first, second = MediaKey(b"1", 2, 5), MediaKey(b"2", 8, 9)
    keys = ExtraKeys("s", "a", (first, second))
    assert [keys.of_block(start, start + 4).media for start in (0, 4, 8, 12)] == [
        (first,),
        (first,),
        (second,),
        (),
    ]
    assert all(keys.of_block(start, start + 4).cache_salt == "s" for start in (0, 12))


def test_digest_is_pinned():
    """The digest is part of what routers and recorded runs see; a change must be meant."""
    assert [h.hex()[:16] for h in hashes([1, 2, 3, 4, 5, 300, 70000, 8])] == [
        "37a98a4c1a0a7e1d",
        "6a7cbd9f887eaf2a",
    ]
    assert HASH_BYTES == 32
