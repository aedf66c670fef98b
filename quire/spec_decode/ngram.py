# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: drafts what followed the previous occurrence of the text's end.

Invariant: a step's cost depends on the number of new tokens, not on the length of the text.

After A. Saxena, "Prompt Lookup Decoding" (2023). Earlier positions are found as in LZ77 coders: by a table of hashes
of the shortest match, and chains of positions that share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text

MOST_CANDIDATES = 16  # most earlier positions compared, latest first
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class NgramDrafter:
    """Drafter that looks up the end of each text in the text itself."""

    keys: ClassVar[frozenset[str]] = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

    def __init__(self, config: EngineConfig) -> None:
        self._shortest, self._longest = config.speculative.settings.prompt_lookup
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        return [self._propose(text, most) for text in texts]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _propose(self, text: Text, most: int) -> Draft:
        index = self._indexes.get(text.request_id)
        if index is None:
            index = self._indexes[text.request_id] = NgramIndex(self._shortest, self._longest)
        index.extend(text.token_ids)
        end, length = index.find(text.token_ids)
        if length == 0:
            return NO_DRAFT
        token_ids: list[int] = text.token_ids[end : end + most].tolist()
        while len(token_ids) < most:  # the match overlaps the end: repeat it
            token_ids += token_ids[: most - len(token_ids)]
        return Draft(token_ids, length)


class NgramIndex:
    """Index of the earlier ends of each run of `shortest` tokens, latest first.

    Args:
        shortest: fewest tokens of a match.
        longest: most tokens compared.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._num_tokens = 0
        self._offsets = np.arange(longest)
        self._powers = np.array(
            [pow(_MULTIPLIER, power + 1, 2**64) for power in range(shortest)], dtype=np.uint64
        )
        self._scalar_powers: list[int] = self._powers.tolist()
        self._resize(0)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Add the new tokens of a text."""
        if len(token_ids) > len(self._earlier):
            self._resize(len(token_ids))
        first = max(self._num_tokens, self._shortest - 1)
        self._num_tokens = len(token_ids)
        if len(token_ids) - first > 16:
            self._add_many(token_ids, first)
        else:
            for place in range(first, len(token_ids)):
                key = self._key(token_ids[place + 1 - self._shortest : place + 1].tolist())
                self._earlier[place] = self._latest[key]
                self._latest[key] = place

    def find(self, token_ids: NDArray[np.int32]) -> tuple[int, int]:
        """Return the end position and length of the longest earlier match of the text's end; ties go to the latest.

        Tokens are compared, so hash collisions do not count.
        """
        place = self._num_tokens - 1
        if place < self._shortest:
            return 0, 0
        places = self._before(place, 1)
        length = self._num_same(token_ids, places[0]) if places else 0
        if places and length < self._longest:
            places = self._before(place, MOST_CANDIDATES)
            if len(places) > 1:
                lengths = self._all_same(token_ids, places)
                best = int(lengths.argmax())
                places, length = places[best:], int(lengths[best])
        return (places[0] + 1, length) if length >= self._shortest else (0, 0)

    def _before(self, place: int, most: int) -> list[int]:
        """Return the latest earlier positions with the same hash."""
        places: list[int] = []
        while len(places) < most and (place := self._earlier[place]) >= 0:
            places.append(place)
        return places

    def _num_same(self, token_ids: NDArray[np.int32], place: int) -> int:
        """Return how many tokens up to a position equal the last ones of the text."""
        last: list[int] = token_ids[-self._longest :].tolist()
        before: list[int] = token_ids[max(place + 1 - self._longest, 0) : place + 1].tolist()
        if before == last:
            return len(last)
        count = 0
        for one, other in zip(reversed(last), reversed(before), strict=False):
            if one != other:
                break
            count += 1
        return count

    def _all_same(self, token_ids: NDArray[np.int32], places: list[int]) -> NDArray[np.int64]:
        """Return [P] the same for several positions."""
        last = token_ids[-self._longest :][::-1]
        columns = np.array(places)[:, None] - self._offsets[: len(last)]
        differ = np.ones((len(places), len(last) + 1), dtype=np.bool_)
        np.not_equal(token_ids[columns], last, out=differ[:, :-1])
        differ[:, :-1] |= columns < 0
        lengths: NDArray[np.int64] = differ.argmax(1)
        return lengths

    def _resize(self, num_tokens: int) -> None:
        """Make room for twice as many tokens, and start over."""
        bits = max(10, int(2 * num_tokens).bit_length())
        self._shift = 64 - bits
        self._latest_array = np.full(2**bits, -1, dtype=np.int32)
        self._earlier_array = np.full(2**bits, -1, dtype=np.int32)
        self._latest, self._earlier = self._latest_array.data, self._earlier_array.data
        self._num_tokens = 0

    def _key(self, token_ids: list[int]) -> int:
        total = sum(map(int.__mul__, token_ids, self._scalar_powers))
        return (((total & _MASK) * _MULTIPLIER) & _MASK) >> self._shift

    def _add_many(self, token_ids: NDArray[np.int32], first: int) -> None:
        start, tokens = first + 1 - self._shortest, token_ids.astype(np.uint64)
        count = len(token_ids) - first
        total = np.zeros(count, dtype=np.uint64)
        for offset, power in enumerate(self._powers):
            total += tokens[start + offset : start + offset + count] * power
        keys = ((total * np.uint64(_MULTIPLIER)) >> np.uint64(self._shift)).astype(np.int64)
        places = np.arange(first, len(token_ids), dtype=np.int32)
        order = keys.argsort(kind="stable")
        follows = np.empty(count, dtype=np.bool_)
        follows[0], follows[1:] = False, keys[order[1:]] == keys[order[:-1]]
        before = self._latest_array[keys[order]]
        before[1:][follows[1:]] = places[order[:-1]][follows[1:]]
        self._earlier_array[places[order]] = before
        self._latest_array[keys] = places  # the last of equal keys stays
