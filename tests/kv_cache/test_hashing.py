from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes

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


def test_the_salt_separates_and_none_is_not_a_salt():
    salts = [None, "", "a", "b", "None"]
    names = {hashes([1, 2, 3, 4], extra_keys=ExtraKeys(cache_salt=salt))[0] for salt in salts}
    assert len(names) == len(salts)


def test_digest_is_pinned():
    """The digest is part of what routers and recorded runs see; a change must be meant."""
    assert [h.hex()[:16] for h in hashes([1, 2, 3, 4, 5, 300, 70000, 8])] == [
        "62d5ead01c4e7387",
        "025c4566189c2df0",
    ]
