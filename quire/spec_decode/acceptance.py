"""How often guesses are right, as seen lately: of a request, and of all guesses of a kind.

Invariant: what is long ago fades, so that a request whose text has changed its nature is tried again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PRIOR_TRIALS = 2.0
"""What is known of a kind counts like so many guesses of the request's own."""
FADE_BY_TRIAL = 0.8
FADE_BY_STEP = 0.98
KIND_FADE = 0.99


@dataclass(slots=True)
class _Trials:
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: int, tried: int) -> None:
        self.accepted += accepted
        self.tried += tried

    def fade(self, factor: float) -> None:
        self.accepted *= factor
        self.tried *= factor

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)


class Acceptance:
    """Estimates the probability that a guess is right if those before it are."""

    def __init__(self) -> None:
        self._by_request: dict[str, _Trials] = {}
        self._by_kind: dict[Hashable, _Trials] = {}

    def note(self, request_id: str, kind: Hashable, num_drafts: int, num_accepted: int) -> None:
        """A step has verified drafts; those behind a wrong one were not tried."""
        tried = min(num_accepted + 1, num_drafts)
        own = self._by_request.setdefault(request_id, _Trials())
        own.fade(FADE_BY_TRIAL)
        own.add(num_accepted, tried)
        all_of_kind = self._by_kind.setdefault(kind, _Trials())
        all_of_kind.fade(KIND_FADE)
        all_of_kind.add(num_accepted, tried)

    def note_idle(self, request_id: str) -> None:
        """A step went by in which nothing was guessed for a request."""
        trials = self._by_request.get(request_id)
        if trials is not None:
            trials.fade(FADE_BY_STEP)

    def note_unasked(self, kind: Hashable) -> None:
        """A step went by for which guesses of a kind seemed not worth the asking."""
        trials = self._by_kind.get(kind)
        if trials is not None:
            trials.fade(KIND_FADE)

    def rate(self, request_id: str, kind: Hashable) -> float:
        """The probability, for a guess of a kind."""
        prior = self._by_kind.get(kind, _NOTHING).rate(0.5)
        return self._by_request.get(request_id, _NOTHING).rate(prior)

    def forget(self, request_id: str) -> None:
        """The request has ended; what it taught about kinds stays."""
        self._by_request.pop(request_id, None)


_NOTHING = _Trials()
