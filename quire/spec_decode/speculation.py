"""`Speculation`: asks the drafters of an engine, and decides which of their guesses a step is to verify.

Invariant: what it decides depends on how long steps took, and no token depends on what it decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.config.speculative import MOST_DRAFTS
from quire.spec_decode.acceptance import Acceptance
from quire.spec_decode.balance import Balance
from quire.spec_decode.choice import choose_depth, choose_lengths
from quire.spec_decode.clocks import Clocks, OwnClock
from quire.spec_decode.drafter import CERTAIN, NO_DRAFT, Draft, Drafter, Owner, Text, takes_time
from quire.spec_decode.step_costs import StepCosts

Filter = Callable[[str, NDArray[np.int32], list[int]], int]
"""Request, its tokens, and guesses -> how many of the first ones its grammar allows."""


class Verified(NamedTuple):
    """What a step found out about a request's drafts."""

    num_drafts: int
    num_accepted: int


class _Guess(NamedTuple):
    """A draft, and whose of which kind it is."""

    request_id: str
    kind: tuple[str, int]
    token_ids: list[int]
    rate: float
    """How likely a token of it is to be right, if those before it are."""


@dataclass(slots=True)
class _Asking:
    """What asking took after one step."""

    seconds: float = 0.0
    each: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of drafters that take time: for how many texts, and the seconds of a guess for all of them."""


class Speculation:
    """Joins drafters: of the guesses that a request gets, those are taken that are most often right.

    Args:
        drafters: by name.
        most: tokens that are guessed at a time for a request.
        adaptive: guess as many as pay; else as many as there are.
        num_ahead: steps that are planned before the result of one is in.
        allowed: drops guesses that no grammar lets through; None: there are no grammars.
        clocks: whose durations decide; None: this process's.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        most: int = MOST_DRAFTS,
        adaptive: bool = True,
        num_ahead: int = 0,
        allowed: Filter | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._drafters = drafters
        self._most = most
        self._adaptive = adaptive
        self._num_ahead = num_ahead
        self._allowed = allowed
        self._requests: dict[str, tuple[int, Owner]] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        self._acceptance = Acceptance()
        self._costs = StepCosts()
        self._guess_costs = {name: StepCosts() for name, one in drafters.items() if takes_time(one)}
        self._balance = Balance()
        self._clocks = clocks or OwnClock()
        self._asking: _Asking | None = None
        """After the last step; None: nobody was asked."""
        self._spent: deque[float | None] = deque()
        """What asking took for the steps that are planned since; None: guessing rested."""

    @property
    def costs(self) -> StepCosts | None:
        """Those of steps, by which it decides, for whoever can time some beforehand; None: it decides nothing."""
        return self._costs if self._adaptive else None

    def add_request(self, request_id: str, num_prompt_tokens: int, owner: Owner) -> None:
        """A request was given a row."""
        self._requests[request_id] = num_prompt_tokens, owner
        self._balance.wake()

    def remove_request(self, request_id: str) -> None:
        """It has ended or was preempted."""
        del self._requests[request_id]
        self._kinds.pop(request_id, None)
        self._acceptance.forget(request_id)
        for drafter in self._drafters.values():
            drafter.forget(request_id)

    def note_step(
        self, verified: Mapping[str, Verified], num_requests: int, width: int, seconds: float
    ) -> None:
        """A step is done, in which so many requests sampled.

        Args:
            verified: of those that had drafts.
            width: tokens that were computed, 0 if it did more than to generate.
        """
        if self._adaptive:
            self._note_times(verified, num_requests, width, seconds)
        for request_id, kind in self._kinds.items():  # nothing was ever guessed for others
            found = verified.get(request_id)
            if found is None:
                self._acceptance.note_idle(request_id)
            else:
                self._acceptance.note(request_id, kind, found.num_drafts, found.num_accepted)

    def _note_times(
        self, verified: Mapping[str, Verified], num_requests: int, width: int, seconds: float
    ) -> None:
        """What the step took, and what asking took for it."""
        seconds, spent_s = self._settle(seconds)
        self._balance.note_time(seconds)
        if not width:
            return
        self._costs.note(num_requests, width, seconds)
        if spent_s is not None and self._costs.knows(num_requests):
            share = sum([one.num_accepted for one in verified.values()]) / num_requests
            plain_s, took_s = self._costs.of(num_requests), self._costs.of(width)
            self._balance.note((1 + share) * plain_s - took_s, spent_s)

    def _settle(self, seconds: float) -> tuple[float, float | None]:
        """The durations that count: of the step, and of asking for what it verified, if anybody was asked."""
        asking = self._asking
        each = {} if asking is None else asking.each
        own = [seconds, 0.0 if asking is None else asking.seconds]
        if each:
            own += [took for _, took in each.values()]
        seconds, asked_s, *took = self._clocks.agreed(own)
        for (name, (count, _)), guess_s in zip(each.items(), took, strict=True):
            self._guess_costs[name].note(count, count, guess_s)
        self._spent.append(None if asking is None else asked_s)
        is_planned = len(self._spent) > self._num_ahead  # steps that were planned without asking come first
        return seconds, self._spent.popleft() if is_planned else None

    def rests(self) -> bool:
        """Whether nobody is to be asked for guesses now; asked once after each step, before `propose`."""
        self._asking = None
        return self._adaptive and self._balance.rests()

    def propose(self, known: Mapping[str, NDArray[np.int32]]) -> dict[str, list[int]]:
        """The tokens of requests that have just sampled -> what may follow them.

        Args:
            known: request id -> all its tokens, of prompt and output.
        """
        asking, started = _Asking(), self._clocks.now()
        texts = [
            Text(name, tokens, *self._requests[name])
            for name, tokens in known.items()
            if name in self._requests  # a plan that follows may have removed it
        ]
        drafts = [self._ask(name, texts, len(known), asking) for name in self._drafters]
        guesses = list(filter(None, map(self._best, texts, *drafts)))
        lengths = [len(guess.token_ids) for guess in guesses]
        if self._adaptive and guesses:
            rates = [guess.rate for guess in guesses]
            lengths = choose_lengths(rates, lengths, len(known), self._costs, self._num_ahead)
        for guess in guesses:
            self._kinds[guess.request_id] = guess.kind
        asking.seconds = self._clocks.now() - started
        self._asking = asking
        return {
            guess.request_id: guess.token_ids[:length]
            for guess, length in zip(guesses, lengths, strict=True)
            if length
        }

    def _ask(self, name: str, texts: Sequence[Text], num_requests: int, asking: _Asking) -> list[Draft]:
        """What one drafter says; one that takes time is asked for as many tokens as pay."""
        drafter, most = self._drafters[name], self._most + self._num_ahead
        costs = self._guess_costs.get(name)
        if costs is None or not texts:
            return drafter.propose(texts, most)
        if self._adaptive:
            rates = [self._acceptance.rate(text.request_id, (name, 0)) for text in texts]
            seconds = costs.of(len(texts)) if costs.knows(len(texts)) else 0.0
            most = choose_depth(rates, most, num_requests, self._costs, seconds, self._num_ahead)
        if most == 0:
            self._acceptance.note_unasked((name, 0))
            return [NO_DRAFT] * len(texts)
        started = self._clocks.now()
        drafts = drafter.propose(texts, most)
        asking.each[name] = len(texts), (self._clocks.now() - started) / most
        return drafts

    def _best(self, text: Text, *drafts: Draft) -> _Guess | None:
        """A guess that is certain, or that is most often right; among equals, of the drafter that is named first."""
        found = [
            self._rated(text.request_id, (name, draft.strength), draft.token_ids)
            for name, draft in zip(self._drafters, drafts, strict=True)
            if draft.token_ids
        ]
        if len(found) > 1:
            found.sort(key=_rank)
        for guess in found:
            count = self._num_allowed(text, guess)
            if count == len(guess.token_ids):
                return guess
            if count:
                return guess._replace(token_ids=guess.token_ids[:count])
        return None

    def _rated(self, request_id: str, kind: tuple[str, int], token_ids: list[int]) -> _Guess:
        return _Guess(request_id, kind, token_ids, self._acceptance.rate(request_id, kind))

    def _num_allowed(self, text: Text, guess: _Guess) -> int:
        if self._allowed is None:
            return len(guess.token_ids)
        return self._allowed(text.request_id, text.token_ids, guess.token_ids)


def _rank(guess: _Guess) -> tuple[bool, float]:
    """Of several guesses, the least goes first."""
    return guess.kind[1] != CERTAIN, -guess.rate
