"""What was used last, in bounded memory, and what of prompts a core is known to have in its cache."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from quire.engine.cache_news import CacheNews, keys_in

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

    def drop(self, key: K) -> None:
        """Forget a key, if it is there."""
        self._keys.pop(key, None)


class CachedPrefixes:
    """The blocks of prompts that the prefix cache of a core has, as it tells, or is about to have: prompts with them
    were sent there, of which it has yet to tell. Without news it is taken to keep those that were sent last.

    Args:
        max_blocks: for which the cache has room.

    Invariant: mostly, with a block those before it in its prompt are there: none of them was ever used earlier, and a
    cache loses the last ones first. So how many of a prompt are there is found by bisection.
    """

    def __init__(self, max_blocks: int) -> None:
        self._told: set[int] = set()
        self._sent: Recent[int] = Recent(max_blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._told or block in self._sent

    def num_known(self, blocks: Sequence[int]) -> int:
        """Of a prompt's blocks, how many there are from its start on."""
        return bisect_left(blocks, True, key=lambda block: block not in self)

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt of these was sent."""
        self._sent.use(reversed(blocks))

    def take_in(self, news: CacheNews) -> None:
        """What was sent and is lost again is lost, and so is all that was there before the cache was cleared."""
        if news.is_cleared:
            self._told.clear()
        self._told.update(keys_in(news.stored))
        for block in keys_in(news.lost):
            self._told.discard(block)
            self._sent.drop(block)
