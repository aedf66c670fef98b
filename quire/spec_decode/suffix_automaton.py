"""The automaton of all suffixes of several texts that grow side by side.

It is that of A. Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

ROOT = 0
MOST_UPDATES = 8
"""Shorter contexts that are told what came next; the chain of them may be as long as the text."""


class SuffixAutomaton:
    """Accepts every run of tokens of the texts that were added, and knows what came last behind each.

    A state stands for some runs that ended at the same places so far, of which it knows the longest.
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
        """Tokens of the longest run of a state."""
        return self._lengths[state]

    def extend(self, state: int, token_id: int) -> int:
        """Add a token behind a text that ends in a state; returns the state in which it ends now."""
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
        """From the state of the longest known end of a text, and its tokens, to those with a token more."""
        while token_id not in self._next[state]:
            if state == ROOT:
                return ROOT, 0
            state = self._links[state]
            length = self._lengths[state]
        return self._next[state][token_id], length + 1

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """The longest end of a run of so many tokens behind which something is known to have come."""
        while self._latest[state] == -1 and state != ROOT:
            state = self._links[state]
            length = self._lengths[state]
        return state, length

    def follow(self, state: int, most: int) -> list[int]:
        """What came behind a state the last time, and behind that."""
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
        """The state of the longest run of `state` with a token more, which `target` may hold among longer ones."""
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
