"""Suffix lookup: what followed when this request, or a recent one of the same owner, had generated the same.

Invariant: nobody's text is in the automata of another owner, and all of them together keep a bounded number of tokens,
running requests aside.

The automaton of all suffixes of several texts is that of A. Blumer et al., "The smallest automaton recognizing the
subwords of a text" (1985), with the texts growing side by side. Guessing by it is after G. Oliaro et al.,
"SuffixDecoding" (2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from quire.config import EngineConfig
from quire.spec_decode.drafter import NO_DRAFT, Draft, Owner, Text

ROOT = 0
MOST_UPDATES = 8
"""Shorter contexts that are told what came next; the chain of them may be as long as the text."""
SHORTEST = 2
"""What follows a single token is no evidence."""
LONGEST_STRENGTH = 16


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
        while len(token_ids) < most and self._latest[state] != -1:
            token_ids.append(self._latest[state])
            state = self._next[state][token_ids[-1]]
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
        for _ in range(MOST_UPDATES):
            self._latest[state] = token_id
            state = self._links[state]
            if state == -1:
                return


class Corpus:
    """Recent outputs of one owner: those that are being added to, and an older generation.

    Args:
        most_tokens: of both together.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self.young = SuffixAutomaton()
        self.old = SuffixAutomaton()
        self.generation = 0

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + self.old.num_tokens

    def renew(self) -> None:
        """Forget the older generation if the other one has become large."""
        if self.young.num_tokens >= self._most_tokens // 2:
            self.young, self.old = SuffixAutomaton(), self.young
            self.generation += 1


class _Reader:
    """One request's output: at the end of a text in the young automaton, and of the longest match in the old one."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._num_read = 0
        self._generation = corpus.generation
        self._young = ROOT
        self._old, self._length = ROOT, 0

    def read(self, text: Text) -> None:
        """Take in what is new of the output."""
        corpus = self.corpus
        start = text.num_prompt_tokens + self._num_read
        self._follow_generation()
        for token_id in text.token_ids[start:].tolist():
            self._old, self._length = corpus.old.advance(self._old, self._length, token_id)
            self._young = corpus.young.extend(self._young, token_id)
        self._num_read = len(text.token_ids) - text.num_prompt_tokens
        corpus.renew()

    def propose(self, most: int) -> Draft:
        """What came behind the longest match."""
        self._follow_generation()
        young, old = self.corpus.young, self.corpus.old
        state, length = young.continued(self._young, young.length(self._young))
        old_state, old_length = old.continued(self._old, self._length)
        automaton = young
        if old_length > length:
            automaton, state, length = old, old_state, old_length
        if length < SHORTEST:
            return NO_DRAFT
        return Draft(automaton.follow(state, most), min(length, LONGEST_STRENGTH))

    def _follow_generation(self) -> None:
        """What was the end of a text is a match, once the automaton is the old one."""
        missed = self.corpus.generation - self._generation
        if missed:
            self._old = self._young if missed == 1 else ROOT
            self._length = self.corpus.old.length(self._old)
            self._young, self._generation = ROOT, self.corpus.generation


class SuffixDrafter:
    """Looks up the end of each output in the recent outputs of its owner, its own included."""

    keys: ClassVar[frozenset[str]] = frozenset({"suffix_decoding_max_cached_tokens"})

    def __init__(self, config: EngineConfig) -> None:
        self._most_tokens = config.speculative.settings.suffix_decoding_max_cached_tokens
        self._corpora: OrderedDict[Owner, Corpus] = OrderedDict()
        self._readers: dict[str, _Reader] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        readers = [self._reader(text) for text in texts]
        for reader, text in zip(readers, texts, strict=True):
            reader.read(text)
        return [reader.propose(most) for reader in readers]

    def forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)

    def _reader(self, text: Text) -> _Reader:
        reader = self._readers.get(text.request_id)
        if reader is None:
            reader = self._readers[text.request_id] = _Reader(self._corpus(text.owner))
        return reader

    def _corpus(self, owner: Owner) -> Corpus:
        """That of an owner, which is now the last to be forgotten."""
        corpus = self._corpora.setdefault(owner, Corpus(self._most_tokens))
        self._corpora.move_to_end(owner)
        while (
            len(self._corpora) > 1 and sum(c.num_tokens for c in self._corpora.values()) > self._most_tokens
        ):
            self._corpora.popitem(last=False)
        return corpus
