# SPDX-License-Identifier: Apache-2.0
"""Suffix automaton: accepts every run of tokens of the texts added to it (A. Blumer et al., 1985)."""

from __future__ import annotations

ROOT = 0
MOST_UPDATES = 8  # most suffix links followed to record the next token; the chain may be as long as the text


class SuffixAutomaton:
    """Suffix automaton of several texts that grow concurrently; stores the latest token after each state.

    A state stands for the token runs that have ended at the same positions so far. A. Blumer et al., "The smallest
    automaton recognizing the subwords of a text" (1985).
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._lengths = [0]
        self._links = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._latest = [-1]

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, state: int) -> int:
        """Return the length of a state's longest run."""
        return self._lengths[state]

    def extend(self, state: int, token_id: int) -> int:
        """Append a token to a text that ends in a state; return its new state."""
        self.num_tokens += 1
        known = self._next[state].get(token_id)
        if known is not None:
            end = self._exactly(state, token_id, known)
        else:
            end = self._new(self._lengths[state] + 1, {}, -1, -1)
            shorter = state
            while shorter != -1 and token_id not in self._next[shorter]:
                self._next[shorter][token_id] = end
                shorter = self._links[shorter]
            found = shorter != -1
            self._links[end] = self._exactly(shorter, token_id, self._next[shorter][token_id]) if found else 0
        self._note(state, token_id)
        return end

    def advance(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Advance a match (state, length) by one token, shortening it as needed."""
        while token_id not in self._next[state]:
            if state == ROOT:
                return ROOT, 0
            state = self._links[state]
            length = self._lengths[state]
        return self._next[state][token_id], length + 1

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """Return the longest suffix of a match (state, length) after which a token is recorded."""
        while self._latest[state] == -1 and state != ROOT:
            state = self._links[state]
            length = self._lengths[state]
        return state, length

    def follow(self, state: int, most: int) -> list[int]:
        """Return the latest tokens recorded after a state, one after the other."""
        token_ids: list[int] = []
        latest, following = self._latest, self._next
        while len(token_ids) < most:
            token_id = latest[state]
            if token_id == -1:
                break
            token_ids.append(token_id)
            state = following[state][token_id]
        return token_ids

    def _new(self, length: int, following: dict[int, int], link: int, latest: int) -> int:
        self._lengths.append(length)
        self._next.append(following)
        self._links.append(link)
        self._latest.append(latest)
        return len(self._lengths) - 1

    def _exactly(self, state: int, token_id: int, target: int) -> int:
        """Return the state of exactly `state`'s longest run plus a token, splitting `target` if it is longer."""
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        part = self._new(length, dict(self._next[target]), self._links[target], self._latest[target])
        self._links[target] = part
        while state != -1 and self._next[state].get(token_id) == target:
            self._next[state][token_id] = part
            state = self._links[state]
        return part

    def _note(self, state: int, token_id: int) -> None:
        latest, links = self._latest, self._links
        for _ in range(MOST_UPDATES):
            latest[state] = token_id
            state = links[state]
            if state == -1:
                return
