"""What steps of each width cost, learned from those that were run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDEST = 256
"""Steps of more tokens are not slower for a token more by less than what it costs."""
HOPE = 0.02
"""A token more is taken to cost so much of a step until it was seen; too little is found out, too much never is."""
FALL, RISE = 0.3, 0.05
"""A step that was held up says little, and one that was fast says that it can be."""


class StepCosts:
    """Seconds of a step in which every request generates, by its width: the tokens that it computes."""

    def __init__(self) -> None:
        self._seconds: NDArray[np.float64] = np.zeros(WIDEST + 1)
        self._runs: NDArray[np.int64] = np.zeros(WIDEST + 1, dtype=np.int64)

    def note(self, width: int, seconds: float) -> None:
        """A step has taken so long. The first one of a width is not counted: it may have been recorded."""
        if width > WIDEST:
            return
        self._runs[width] += 1
        if self._runs[width] < 2:
            return
        known = self._seconds[width]
        if known == 0.0:
            self._seconds[width] = seconds
        elif seconds < known:
            self._seconds[width] += FALL * (seconds - known)
        else:
            self._seconds[width] += RISE * (min(seconds, 2 * known) - known)

    def of(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimates [W], in units that are the same for all, of steps of up to `WIDEST` tokens."""
        known = np.flatnonzero(self._seconds)
        if len(known) == 0:
            return 1.0 + HOPE * widths
        seconds = np.maximum.accumulate(self._seconds[known])
        beyond = 1.0 + HOPE * np.maximum(widths - known[-1], 0)
        estimates: NDArray[np.float64] = np.interp(widths, known, seconds) * beyond
        return estimates
