# SPDX-License-Identifier: Apache-2.0
"""Pure beam search, `BeamSearch`, which the core advances with each step and the front end with each update.

It follows Transformers' `generate(num_beams=...)`. All live beams have one length, the likeliest first, and a
finished beam never changes. Of a step's best candidates, ended ones count only among the first `beam_width`; the search
continues with the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.sampling_params import BeamSearchParams
from quire.scheduler.output import TokenLogprobs

_CERTAIN = -1  # Place of a forced token among the most likely ones.


class Beam(NamedTuple):
    """A sequence of generated tokens."""

    token_ids: list[int]
    logprob: float  # Sum over its tokens.
    parent: int = 0  # Index of the last step's live beam that it continues.
    before: Beam | None = None  # That beam.
    entry: TokenLogprobs | None = (
        None  # The most likely tokens at the last one's position, behind a sampled one.
    )
    place: int = 0  # Index of the last token among these.

    def positions(self) -> list[TokenLogprobs]:
        """Return for each token the token itself and its alternatives."""
        found: list[TokenLogprobs] = []
        beam = self
        while beam.before is not None and beam.entry is not None:
            found.append(_position(beam.token_ids[-1], beam.entry, beam.place))
            beam = beam.before
        return found[::-1]


def _position(token_id: int, entry: TokenLogprobs, place: int) -> TokenLogprobs:
    logprob = 0.0 if place == _CERTAIN else entry.logprobs[place]
    return TokenLogprobs([token_id, *entry.token_ids[1:]], [logprob, *entry.logprobs[1:]], max(place, 1))


class FinishedBeam(NamedTuple):
    beam: Beam
    score: float
    reason: str  # Either "stop" or "length".


_Candidate = tuple[float, int, int, int]
"""Negated logprob, parent, token and its index in the parent's most likely tokens, in the order of preference."""


class TokenRules:
    """Tokens that a search may not choose, as in transformers: they are passed over, and other logprobs stay.

    Args:
        params: of the search.
        eos_token_ids: tokens that end a sequence, which `min_tokens` bans at first.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self._always = frozenset(params.banned_token_ids)
        self._ends = eos_token_ids
        self._min_tokens = params.min_tokens
        self._ngram = params.no_repeat_ngram_size
        self._before = list(params.decoder_token_ids)

    def banned(self, token_ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that may not follow a beam's."""
        found = self._always
        if len(token_ids) < self._min_tokens:
            found |= self._ends
        if self._ngram:
            found |= self._repeating([*self._before, *token_ids])
        return found

    def _repeating(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that have followed the last tokens, one fewer than an n-gram has, before."""
        size = self._ngram - 1
        if len(ids) < size:
            return frozenset()
        last = ids[len(ids) - size :]
        starts = range(len(ids) - size)
        return frozenset(ids[start + size] for start in starts if ids[start : start + size] == last)


class BeamSearch:
    """Pure state of one beam search.

    Args:
        params: `max_tokens` is at most the available room.
        eos_token_ids: tokens that end a sequence.

    Attributes:
        live: beams that need a next token.
        finished: the best ended beams, best first.
        is_done: the search is complete.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]) -> None:
        self.params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._rules = TokenRules(params, frozenset(eos_token_ids))
        self._num_wanted = max(2, 1 + len(self._eos)) * params.beam_width
        self.restart()

    def restart(self) -> None:
        """Begin again."""
        self.live = [Beam([], 0.0)]
        self.finished: list[FinishedBeam] = []
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each live beam."""
        return len(self.live[0].token_ids)

    @property
    def num_candidates(self) -> int:
        """Most likely tokens needed of each live beam in the next step."""
        return self._num_wanted + max([len(self._rules.banned(beam.token_ids)) for beam in self.live])

    @property
    def num_logprobs(self) -> int:
        """Most likely tokens reported of each live beam in the next step."""
        return max(self.num_candidates, self.params.logprobs)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Advance by one step; entry i has the most likely next tokens of live beam i, behind its own token."""
        width, length = self.params.beam_width, self.length + 1
        is_last = length >= self.params.max_tokens
        forced = self.params.forced_last_token_id if is_last else None
        candidates = self._candidates(entries) if forced is None else self._forced(forced)
        ended = [one for one in candidates[:width] if is_last or one[2] in self._eos]
        if ended:
            self._finish([self._grown(one, entries) for one in ended])
        open_ones = [] if is_last else [one for one in candidates if one[2] not in self._eos][:width]
        if not open_ones or not self._may_improve(-open_ones[0][0], length):
            self.is_done = True
            return
        self.live = [self._grown(candidate, entries) for candidate in open_ones]

    def best(self, reason: str | None = None) -> list[FinishedBeam]:
        """Return the best sequences, best first; a reason also ends the live ones."""
        found = list(self.finished)
        if reason is not None and not self.is_done:
            found += [FinishedBeam(beam, self._score(beam), reason) for beam in self.live]
            found.sort(key=lambda one: -one.score)
        return found[: self.params.beam_width]

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> list[_Candidate]:
        most = self.num_candidates + 1
        found: list[_Candidate] = []
        for parent, (beam, entry) in enumerate(zip(self.live, entries, strict=True)):
            banned, start = self._rules.banned(beam.token_ids), beam.logprob
            pairs = zip(entry.token_ids[1:most], entry.logprobs[1:most], strict=True)
            found += [
                (-(start + logprob), parent, token_id, place)
                for place, (token_id, logprob) in enumerate(pairs, 1)
                if token_id not in banned and logprob > -math.inf
            ]
        found.sort()
        return found[: self._num_wanted]

    def _forced(self, token_id: int) -> list[_Candidate]:
        """Return every live beam with a token that is certain, so it costs nothing."""
        return [(-beam.logprob, parent, token_id, _CERTAIN) for parent, beam in enumerate(self.live)]

    def _grown(self, candidate: _Candidate, entries: Sequence[TokenLogprobs]) -> Beam:
        negated, parent, token_id, place = candidate
        beam = self.live[parent]
        return Beam([*beam.token_ids, token_id], -negated, parent, beam, entries[parent], place)

    def _finish(self, beams: Sequence[Beam]) -> None:
        """Rank newly ended beams together with the earlier ones."""
        for beam in beams:
            reason = "stop" if beam.token_ids[-1] in self._eos else "length"
            self.finished.append(FinishedBeam(beam, self._score(beam), reason))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.params.beam_width :]

    def _score(self, beam: Beam) -> float:
        length = len(beam.token_ids) + self.params.num_forced_tokens
        return beam.logprob / math.pow(max(length, 1), self.params.length_penalty)

    def _may_improve(self, best_open: float, length: int) -> bool:
        """Return whether an open sequence could still be among the best."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        is_patient = params.early_stopping == "never" and params.length_penalty > 0.0
        reach = (params.max_tokens if is_patient else length) + params.num_forced_tokens
        return best_open / math.pow(reach, params.length_penalty) > self.finished[-1].score
