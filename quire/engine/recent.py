"""What was used last, in bounded memory: keys, and the blocks of prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from quire.kv_cache.hashing import BlockHash

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """The keys used last, at most so many; whichever has not been used for longest goes first."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, keys: Iterable[K]) -> None:
        """The last of these is the one used last."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)


class RecentPrefixes:
    """The blocks that a prefix cache of so many blocks is likely to hold, by the prompts that it was given.

    Invariant: with a block those before it in its prompt are there, because none of them was ever used earlier. So
    how many blocks of a prompt are there is found by bisection.
    """

    def __init__(self, max_blocks: int) -> None:
        self._blocks: Recent[BlockHash] = Recent(max_blocks)

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """Of a prompt's blocks, how many there are from its start on."""
        return bisect_left(hashes, True, key=lambda block: block not in self._blocks)

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt of these blocks was given."""
        self._blocks.use(reversed(hashes))
