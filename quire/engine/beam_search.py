"""`BeamSearch`: which sequences to follow, and when to stop; tokens and their logprobs in, the next sequences out.

Invariant: pure; all live beams are of one length, the likeliest first, and a finished one never changes. After the
search of Transformers' `generate(num_beams=...)`: of the best candidates of a step those that have ended count only if
they are among the first `beam_width`, and the others are what the search goes on with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.beam_search_params import BeamSearchParams
from quire.scheduler.output import TokenLogprobs


class Beam(NamedTuple):
    """A sequence of generated tokens."""

    token_ids: list[int]
    logprob: float
    """Sum over its tokens."""
    positions: list[TokenLogprobs]
    """For each token itself and the most likely ones in its place."""
    parent: int = 0
    """Which of the last step's live beams it goes on from."""


class Finished(NamedTuple):
    beam: Beam
    score: float
    reason: str
    """"stop" or "length"."""


class _Candidate(NamedTuple):
    logprob: float
    parent: int
    place: int
    """In the parent's most likely tokens."""
    token_id: int


class BeamSearch:
    """One search.

    Args:
        params: `max_tokens` is no more than there is room for.
        eos_token_ids: tokens that end a sequence.

    Attributes:
        live: beams to get the next token of.
        finished: the best that have ended, best first.
        is_done: nothing is to be done any more.
        num_candidates: most likely tokens wanted of each live beam.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]) -> None:
        self.params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.num_candidates = max(2, 1 + len(self._eos)) * params.beam_width
        self.live = [Beam([], 0.0, [])]
        self.finished: list[Finished] = []
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each live beam."""
        return len(self.live[0].token_ids)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take in the most likely next tokens of each live beam, which come behind another token in each entry."""
        width, length = self.params.beam_width, self.length + 1
        candidates = self._candidates(entries)
        is_last = length >= self.params.max_tokens
        ended = [is_last or candidate.token_id in self._eos for candidate in candidates]
        first = zip(candidates[:width], ended, strict=False)
        self._finish([self._grown(candidate, entries) for candidate, is_ended in first if is_ended])
        open_ones = [one for one, is_ended in zip(candidates, ended, strict=True) if not is_ended][:width]
        if not open_ones or not self._may_improve(open_ones[0].logprob, length):
            self.is_done = True
            return
        self.live = [self._grown(candidate, entries) for candidate in open_ones]

    def best(self, reason: str | None = None) -> list[Finished]:
        """The best sequences, best first; with a reason, live ones too, as if they ended for it now."""
        found = list(self.finished)
        if reason is not None and not self.is_done:
            found += [Finished(beam, self._score(beam), reason) for beam in self.live]
            found.sort(key=lambda one: -one.score)
        return found[: self.params.beam_width]

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> list[_Candidate]:
        found = [
            _Candidate(beam.logprob + entry.logprobs[place], parent, place, entry.token_ids[place])
            for parent, (beam, entry) in enumerate(zip(self.live, entries, strict=True))
            for place in range(1, min(len(entry.token_ids), self.num_candidates + 1))
        ]
        found.sort(key=lambda one: (-one.logprob, one.parent, one.token_id))
        return found[: self.num_candidates]

    def _grown(self, candidate: _Candidate, entries: Sequence[TokenLogprobs]) -> Beam:
        beam, entry, place = self.live[candidate.parent], entries[candidate.parent], candidate.place
        position = TokenLogprobs(
            [candidate.token_id, *entry.token_ids[1:]],
            [entry.logprobs[place], *entry.logprobs[1:]],
            place,
        )
        tokens = [*beam.token_ids, candidate.token_id]
        return Beam(tokens, candidate.logprob, [*beam.positions, position], candidate.parent)

    def _finish(self, beams: Sequence[Beam]) -> None:
        """Let the beams that end in one step compete with each other and with those that ended before."""
        for beam in beams:
            reason = "stop" if beam.token_ids[-1] in self._eos else "length"
            self.finished.append(Finished(beam, self._score(beam), reason))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.params.beam_width :]

    def _score(self, beam: Beam) -> float:
        return beam.logprob / math.pow(max(len(beam.token_ids), 1), self.params.length_penalty)

    def _may_improve(self, best_open: float, length: int) -> bool:
        """Whether an open sequence could yet be among the best."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        is_patient = params.early_stopping == "never" and params.length_penalty > 0.0
        reach = params.max_tokens if is_patient else length
        return best_open / math.pow(reach, params.length_penalty) > self.finished[-1].score
