# SPDX-License-Identifier: Apache-2.0
"""Acceptance rates of drafts, recent ones first: by request, and by kind of draft.

Invariant: old trials fade, so a request whose text changes its nature is drafted for again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

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
