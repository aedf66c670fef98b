"""Whether guessing pays: what it saves against what it takes."""

from __future__ import annotations

FADE = 0.95
TRIAL_STEPS = 16
"""Steps for which it is tried before it may rest."""
SHORTEST_REST, LONGEST_REST = 16, 512
SHARE = 0.01
"""Of all time, what trials in vain may take."""


class Balance:
    """Lets guessing rest while it takes more time of the host, and of steps, than right guesses save.

    After each rest it is tried again; each time in vain, the next rest is twice as long.

    Invariant: what trials took in vain is at most `SHARE` of the time since, but for what the last of them took.
    """

    def __init__(self) -> None:
        self._saved = self._spent = 0.0
        self._num_tried = 0
        self._rest = 0
        self._next_rest = SHORTEST_REST
        self._lost = 0.0
        """Seconds that are not yet a small enough share."""

    def note(self, saved_s: float, spent_s: float) -> None:
        """A step with guessing: what right guesses saved, less what wrong ones cost, and what the host took."""
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
        """So much has gone by, with guessing or without."""
        self._lost = max(0.0, self._lost - SHARE * seconds)

    def wake(self) -> None:
        """There is a new text, so it is worth trying again soon."""
        self._rest = min(self._rest, SHORTEST_REST)

    def rests(self) -> bool:
        """Whether the next step is to be without guesses; asked once for each."""
        if self._rest == 0:
            return self._num_tried == 0 and self._lost > 0.0
        self._rest -= 1
        return True
