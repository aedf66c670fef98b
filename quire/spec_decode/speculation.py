# SPDX-License-Identifier: Apache-2.0
"""`Speculation`: calls the drafters of an engine and decides which drafts a step verifies.

Invariant: its decisions depend on how long steps took; no token depends on its decisions.

Acceptance rates are kept by request and by kind of draft; old trials fade, so a request whose text changes its nature
is drafted for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.config.speculative import DEFAULT_NUM_DRAFTS
from quire.spec_decode.drafter import CERTAIN, NO_DRAFT, Draft, Drafter, Owner, Text, takes_time
from quire.spec_decode.step_costs import OwnClock, StepClocks, StepCosts, choose_depth, choose_lengths

FADE = 0.95
TRIAL_STEPS = 16  # steps with drafts before a pause
SHORTEST_REST, LONGEST_REST = 16, 512  # steps of a pause
SHARE = 0.01  # most of all time that failed trials may take


class DraftingBalance:
    """Pauses drafting while it takes more time of the host and of steps than accepted drafts save.

    After each pause it is tried again; each failed trial doubles the next pause.

    Invariant: failed trials take at most `SHARE` of the time since, except for the last of them.
    """

    def __init__(self) -> None:
        self._saved = self._spent = 0.0
        self._num_tried = 0
        self._rest = 0
        self._next_rest = SHORTEST_REST
        self._lost = 0.0
        """Seconds lost that are not yet within `SHARE`."""

    def note(self, saved_s: float, spent_s: float) -> None:
        """Record a step with drafts: net savings of verification, and host time of drafting."""
        self._saved = FADE * self._saved + saved_s
        self._spent = FADE * self._spent + spent_s
        self._lost = max(0.0, self._lost + spent_s - saved_s)
        self._num_tried += 1
        if self._saved >= self._spent:
            self._next_rest = SHORTEST_REST
        elif self._num_tried >= TRIAL_STEPS:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            self._saved = self._spent = 0.0
            self._num_tried = 0

    def note_time(self, seconds: float) -> None:
        """Record elapsed time, with or without drafting."""
        self._lost = max(0.0, self._lost - SHARE * seconds)

    def wake(self) -> None:
        """Shorten the pause: there is a new text."""
        self._rest = min(self._rest, SHORTEST_REST)

    def rests(self) -> bool:
        """Return whether the next step has no drafts; call once per step."""
        if self._rest == 0:
            return self._num_tried == 0 and self._lost > 0.0
        self._rest -= 1
        return True


Filter = Callable[[str, NDArray[np.int32], list[int]], int]
"""Maps request, its tokens and drafts to the number of leading drafts that its grammar allows."""


class Verified(NamedTuple):
    """Result of verifying a request's drafts."""

    num_drafts: int
    num_accepted: int


class _RatedDraft(NamedTuple):
    """Draft with its request and kind."""

    request_id: str
    kind: tuple[str, int]
    token_ids: list[int]
    rate: float
    """Probability that a token is accepted if those before it are."""


@dataclass(slots=True)
class _Drafting:
    """Time of drafting after one step."""

    seconds: float = 0.0
    each: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Drafters that take time: number of texts, and seconds per draft token for all of them."""


class Speculation:
    """Combination of drafters: of a request's drafts, the one most often accepted is used.

    Args:
        drafters: drafters by name.
        most: most draft tokens of a request.
        adaptive: verify as many drafts as pay; else all.
        num_ahead: steps planned before the result of one is available.
        allowed: counts the drafts that a grammar allows; None: there are no grammars.
        clocks: measure the durations; None: this process's.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        most: int = DEFAULT_NUM_DRAFTS,
        adaptive: bool = True,
        num_ahead: int = 0,
        allowed: Filter | None = None,
        clocks: StepClocks | None = None,
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
        self._draft_costs = {name: StepCosts() for name, one in drafters.items() if takes_time(one)}
        self._balance = DraftingBalance()
        self._clocks = clocks or OwnClock()
        self._drafting: _Drafting | None = None
        """Drafting after the last step; None: it was paused."""
        self._spent: deque[float | None] = deque()
        """Seconds of drafting for each step planned since; None: it was paused."""

    @property
    def costs(self) -> StepCosts | None:
        """Cost model of steps, for calibration; None: it is not used."""
        return self._costs if self._adaptive else None

    def add_request(self, request_id: str, num_prompt_tokens: int, owner: Owner) -> None:
        """Add a request that was given a row."""
        self._requests[request_id] = num_prompt_tokens, owner
        self._balance.wake()

    def remove_request(self, request_id: str) -> None:
        """Drop a request that has finished or been preempted."""
        del self._requests[request_id]
        self._kinds.pop(request_id, None)
        self._acceptance.forget(request_id)
        for drafter in self._drafters.values():
            drafter.forget(request_id)

    def note_step(
        self, verified: Mapping[str, Verified], num_requests: int, width: int, seconds: float
    ) -> None:
        """Record a finished step in which `num_requests` sampled.

        Args:
            verified: results of requests with drafts.
            width: tokens computed; 0 if the step also computed prompts.
        """
        if self._adaptive:
            self._note_times(verified, num_requests, width, seconds)
        for request_id, kind in self._kinds.items():  # other requests never had drafts
            found = verified.get(request_id)
            if found is None:
                self._acceptance.note_idle(request_id)
            else:
                self._acceptance.note(request_id, kind, found.num_drafts, found.num_accepted)

    def _note_times(
        self, verified: Mapping[str, Verified], num_requests: int, width: int, seconds: float
    ) -> None:
        """Record the time of a step and of drafting for it."""
        seconds, spent_s = self._agree(seconds)
        self._balance.note_time(seconds)
        if not width:
            return
        self._costs.note(num_requests, width, seconds)
        if spent_s is not None and self._costs.is_known(num_requests):
            share = sum([one.num_accepted for one in verified.values()]) / num_requests
            plain_s, took_s = self._costs.of(num_requests), self._costs.of(width)
            self._balance.note((1 + share) * plain_s - took_s, spent_s)

    def _agree(self, seconds: float) -> tuple[float, float | None]:
        """Return the agreed seconds of the step and of drafting for what it verified, if any."""
        drafting = self._drafting
        each = {} if drafting is None else drafting.each
        own = [seconds, 0.0 if drafting is None else drafting.seconds]
        if each:
            own += [took for _, took in each.values()]
        seconds, asked_s, *took = self._clocks.agreed(own)
        for (name, (count, _)), draft_s in zip(each.items(), took, strict=True):
            self._draft_costs[name].note(count, count, draft_s)
        self._spent.append(None if drafting is None else asked_s)
        is_planned = len(self._spent) > self._num_ahead  # the first steps were planned without drafts
        return seconds, self._spent.popleft() if is_planned else None

    def rests(self) -> bool:
        """Return whether drafting is paused; call once after each step, before `propose`."""
        self._drafting = None
        return self._adaptive and self._balance.rests()

    def propose(self, known: Mapping[str, NDArray[np.int32]]) -> dict[str, list[int]]:
        """Return the drafts of requests that have just sampled.

        Args:
            known: request id -> its prompt and output tokens.
        """
        drafting, started = _Drafting(), self._clocks.now()
        texts = [
            Text(name, tokens, *self._requests[name])
            for name, tokens in known.items()
            if name in self._requests  # a later plan may have removed it
        ]
        drafts = [self._ask(name, texts, len(known), drafting) for name in self._drafters]
        rated = list(filter(None, map(self._best, texts, *drafts)))
        lengths = [len(draft.token_ids) for draft in rated]
        if self._adaptive and rated:
            rates = [draft.rate for draft in rated]
            lengths = choose_lengths(rates, lengths, len(known), self._costs, self._num_ahead)
        for draft in rated:
            self._kinds[draft.request_id] = draft.kind
        drafting.seconds = self._clocks.now() - started
        self._drafting = drafting
        return {
            draft.request_id: draft.token_ids[:length]
            for draft, length in zip(rated, lengths, strict=True)
            if length
        }

    def _ask(self, name: str, texts: Sequence[Text], num_requests: int, drafting: _Drafting) -> list[Draft]:
        """Return one drafter's drafts; one that takes time is called for as many tokens as pay."""
        drafter, most = self._drafters[name], self._most + self._num_ahead
        costs = self._draft_costs.get(name)
        if costs is None or not texts:
            return drafter.propose(texts, most)
        if self._adaptive:
            rates = [self._acceptance.rate(text.request_id, (name, 0)) for text in texts]
            seconds = costs.of(len(texts)) if costs.is_known(len(texts)) else 0.0
            most = choose_depth(rates, most, num_requests, self._costs, seconds, self._num_ahead)
        if most == 0:
            self._acceptance.note_unasked((name, 0))
            return [NO_DRAFT] * len(texts)
        started = self._clocks.now()
        drafts = drafter.propose(texts, most)
        drafting.each[name] = len(texts), (self._clocks.now() - started) / most
        return drafts

    def _best(self, text: Text, *drafts: Draft) -> _RatedDraft | None:
        """Return a certain draft, or the one most often accepted; ties go to the drafter named first."""
        found = [
            self._rated(text.request_id, (name, draft.strength), draft.token_ids)
            for name, draft in zip(self._drafters, drafts, strict=True)
            if draft.token_ids
        ]
        if len(found) > 1:
            found.sort(key=_rank)
        for draft in found:
            count = self._num_allowed(text, draft)
            if count == len(draft.token_ids):
                return draft
            if count:
                return draft._replace(token_ids=draft.token_ids[:count])
        return None

    def _rated(self, request_id: str, kind: tuple[str, int], token_ids: list[int]) -> _RatedDraft:
        return _RatedDraft(request_id, kind, token_ids, self._acceptance.rate(request_id, kind))

    def _num_allowed(self, text: Text, draft: _RatedDraft) -> int:
        if self._allowed is None:
            return len(draft.token_ids)
        return self._allowed(text.request_id, text.token_ids, draft.token_ids)


def _rank(draft: _RatedDraft) -> tuple[bool, float]:
    """Return the sort key of a draft; the lowest is best."""
    return draft.kind[1] != CERTAIN, -draft.rate


PRIOR_TRIALS = 2.0  # weight of the kind's rate, in trials of the request
FADE_BY_TRIAL = 0.8
FADE_BY_STEP = 0.98
KIND_FADE = 0.99


@dataclass(slots=True)
class _Trials:
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: int, tried: int, fade: float) -> None:
        """Add trials to the faded earlier ones."""
        self.accepted = fade * self.accepted + accepted
        self.tried = fade * self.tried + tried

    def fade(self, factor: float) -> None:
        self.accepted *= factor
        self.tried *= factor

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)


class Acceptance:
    """Estimate of the probability that a draft token is accepted if those before it are."""

    def __init__(self) -> None:
        self._by_request: dict[str, _Trials] = {}
        self._by_kind: dict[Hashable, _Trials] = {}

    def note(self, request_id: str, kind: Hashable, num_drafts: int, num_accepted: int) -> None:
        """Record verified drafts; tokens after a rejected one were not tried."""
        tried = min(num_accepted + 1, num_drafts)
        own, all_of_kind = self._by_request.get(request_id), self._by_kind.get(kind)
        if own is None:
            own = self._by_request[request_id] = _Trials()
        if all_of_kind is None:
            all_of_kind = self._by_kind[kind] = _Trials()
        own.add(num_accepted, tried, FADE_BY_TRIAL)
        all_of_kind.add(num_accepted, tried, KIND_FADE)

    def note_idle(self, request_id: str) -> None:
        """Record a step without drafts of this request."""
        trials = self._by_request.get(request_id)
        if trials is not None:
            trials.fade(FADE_BY_STEP)

    def note_unasked(self, kind: Hashable) -> None:
        """Record a step for which drafts of a kind did not seem to pay."""
        trials = self._by_kind.get(kind)
        if trials is not None:
            trials.fade(KIND_FADE)

    def rate(self, request_id: str, kind: Hashable) -> float:
        """Return the probability for a draft token of a kind."""
        own, all_of_kind = self._by_request.get(request_id), self._by_kind.get(kind)
        prior = 0.5 if all_of_kind is None else all_of_kind.rate(0.5)
        return prior if own is None else own.rate(prior)

    def forget(self, request_id: str) -> None:
        """Drop a finished request; its part in the kinds' rates stays."""
        self._by_request.pop(request_id, None)
