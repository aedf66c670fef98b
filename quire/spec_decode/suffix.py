# SPDX-License-Identifier: Apache-2.0
"""Suffix drafter: looks up the end of an output in recent outputs of the same owner, its own included.

Invariant: no owner's text is in another owner's automata, and all automata together hold a bounded number of tokens,
running requests aside.

After G. Oliaro et al., "SuffixDecoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.config import EngineConfig
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text
from quire.spec_decode.recorded import Corpora, Corpus
from quire.spec_decode.suffix_automaton import ROOT

SHORTEST = 2  # shortest match; a single token is no evidence
LONGEST_STRENGTH = 16


class _OutputPosition:
    """Position of one request's output: end of a text in the young automaton, longest match in the old one."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._num_read = 0
        self._generation = corpus.generation
        self._young = ROOT
        self._old, self._length = ROOT, 0

    def read(self, text: Text) -> None:
        """Add the new tokens of the output."""
        corpus = self.corpus
        start = text.num_prompt_tokens + self._num_read
        self._follow_generation()
        for token_id in text.token_ids[start:].tolist():
            self._old, self._length = corpus.old.advance(self._old, self._length, token_id)
            self._young = corpus.young.extend(self._young, token_id)
        self._num_read = len(text.token_ids) - text.num_prompt_tokens
        corpus.renew()

    def propose(self, most: int) -> Draft:
        """Return what followed the longest match."""
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
        """Turn the end of a text into a match once its automaton has become the old one."""
        missed = self.corpus.generation - self._generation
        if missed:
            self._old = self._young if missed == 1 else ROOT
            self._length = self.corpus.old.length(self._old)
            self._young, self._generation = ROOT, self.corpus.generation


class SuffixDrafter:
    """Drafter that looks up the end of each output in the recent outputs of its owner."""

    keys: ClassVar[frozenset[str]] = frozenset({"suffix_decoding_max_cached_tokens"})

    def __init__(self, config: EngineConfig) -> None:
        self._corpora = Corpora(config.speculative.settings.suffix_decoding_max_cached_tokens)
        self._readers: dict[str, _OutputPosition] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        readers = [self._reader(text) for text in texts]
        for reader, text in zip(readers, texts, strict=True):
            reader.read(text)
            self._corpora.charge(text.owner, reader.corpus)
        return [reader.propose(most) for reader in readers]

    def forget(self, request_id: str) -> None:
        self._readers.pop(request_id, None)

    def _reader(self, text: Text) -> _OutputPosition:
        reader = self._readers.get(text.request_id)
        if reader is None:
            reader = self._readers[text.request_id] = _OutputPosition(self._corpora.for_owner(text.owner))
        return reader
