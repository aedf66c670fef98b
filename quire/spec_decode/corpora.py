"""Recent outputs by owner, of which all together keep a bounded number of tokens.

Invariant: what finding a corpus costs depends on what is forgotten for it, and not on how many there are: owners are as
many as clients like.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.spec_decode.drafter import Owner
from quire.spec_decode.suffix_automaton import SuffixAutomaton

CORPUS_TOKENS = 4
"""What a corpus takes that has no tokens, in tokens: some two kilobytes."""


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


class Corpora:
    """Those of all owners, the ones that were asked for last kept.

    Args:
        most_tokens: of all together, where running requests add none; a corpus counts as `CORPUS_TOKENS` more.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._by_owner: OrderedDict[Owner, Corpus] = OrderedDict()
        self._charged: dict[Owner, int] = {}
        self.num_tokens = 0
        """That are charged for."""

    def __len__(self) -> int:
        return len(self._by_owner)

    def of(self, owner: Owner) -> Corpus:
        """That of an owner, which is now the last to be forgotten."""
        corpus = self._by_owner.get(owner)
        if corpus is None:
            corpus = self._by_owner[owner] = Corpus(self._most_tokens)
            self.charge(owner, corpus)
        self._by_owner.move_to_end(owner)
        while len(self._by_owner) > 1 and self.num_tokens > self._most_tokens:
            oldest, _ = self._by_owner.popitem(last=False)
            self.num_tokens -= self._charged.pop(oldest)
        return corpus

    def charge(self, owner: Owner, corpus: Corpus) -> None:
        """Its tokens may be others now; one that was forgotten while a request runs on in it is nobody's."""
        if self._by_owner.get(owner) is corpus:
            tokens = CORPUS_TOKENS + corpus.num_tokens
            self.num_tokens += tokens - self._charged.get(owner, 0)
            self._charged[owner] = tokens
