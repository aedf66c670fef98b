# SPDX-License-Identifier: Apache-2.0
"""Corpora of recent outputs for the suffix drafter, and a synthetic drafter that replays recorded outputs."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.spec_decode.drafter import NO_DRAFT, Draft, Owner, Text
from quire.spec_decode.suffix_automaton import SuffixAutomaton

CORPUS_TOKENS = 4  # overhead of a corpus, in tokens: about two kilobytes


class Corpus:
    """Recent outputs of one owner: a young generation that grows, and an older one.

    Args:
        most_tokens: limit of both together.
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
        """Drop the older generation if the young one has become large."""
        if self.young.num_tokens >= self._most_tokens // 2:
            self.young, self.old = SuffixAutomaton(), self.young
            self.generation += 1


class Corpora:
    """Corpora by owner, least recently used dropped first.

    Invariant: the cost of a lookup depends on what it drops, not on the number of owners, which clients control.

    Args:
        most_tokens: limit of all together, running requests aside; a corpus costs `CORPUS_TOKENS` more.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._by_owner: OrderedDict[Owner, Corpus] = OrderedDict()
        self._charged: dict[Owner, int] = {}
        self.num_tokens = 0
        """Tokens charged."""

    def __len__(self) -> int:
        return len(self._by_owner)

    def for_owner(self, owner: Owner) -> Corpus:
        """Return the corpus of an owner, now the most recently used."""
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
        """Update the tokens charged for a corpus; one that was dropped while a request still uses it is not charged."""
        if self._by_owner.get(owner) is corpus:
            tokens = CORPUS_TOKENS + corpus.num_tokens
            self.num_tokens += tokens - self._charged.get(owner, 0)
            self._charged[owner] = tokens


class RecordedOutput(msgspec.Struct, frozen=True):
    """Output of an earlier request."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class RecordedDrafter:
    """Drafter with a file of recorded outputs, each token right with a given probability.

    Raises:
        ConfigError: the file is missing or has no recorded outputs.
    """

    keys: ClassVar[frozenset[str]] = frozenset({"model", "synthetic_acceptance_rate"})

    def __init__(self, config: EngineConfig) -> None:
        settings = config.speculative.settings
        self._rate = settings.synthetic_acceptance_rate
        self._vocab_size = config.arch.vocab_size
        self._outputs = {tuple(output.prompt_token_ids): output.token_ids for output in _read(settings.model)}
        self._by_request: dict[str, list[int]] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        return [self._propose(text, most) for text in texts]

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def _propose(self, text: Text, most: int) -> Draft:
        output = self._by_request.get(text.request_id)
        if output is None:
            prompt = tuple(text.token_ids[: text.num_prompt_tokens].tolist())
            output = self._by_request[text.request_id] = self._outputs.get(prompt, [])
        place = len(text.token_ids) - text.num_prompt_tokens
        right = output[place : place + most]
        if not right:
            return NO_DRAFT
        draw = random.Random(place)
        wrong = ((token_id + 1) % self._vocab_size for token_id in right)
        return Draft(
            [good if draw.random() < self._rate else bad for good, bad in zip(right, wrong, strict=True)]
        )


def write_recorded(path: Path, outputs: Sequence[RecordedOutput]) -> None:
    """Write a file for `RecordedDrafter`."""
    path.write_bytes(msgspec.json.encode(outputs))


def _read(path: str | None) -> list[RecordedOutput]:
    if path is None:
        raise ConfigError(
            '--speculative-config: method "recorded" needs a "model", a file of recorded outputs'
        )
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[RecordedOutput])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--speculative-config: model {path!r} has no recorded outputs: {error}") from None
