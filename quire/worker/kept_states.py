"""Hidden states that steps leave, for whoever is to guess behind them.

Invariant: of each row, states of tokens that follow each other, from position `firsts` on; those of wrong guesses are
written over by what the next step computes in their places.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.worker.inputs import StepLayout

Rows = NDArray[np.int64]


class KeptStates:
    """A few states for each of `num_rows` rows; room for more is made when more are kept.

    Attributes:
        firsts: [S] position of the first one of each row; to change it is to drop all that are kept of that row.
    """

    def __init__(self, num_rows: int) -> None:
        self.firsts: Rows = np.zeros(num_rows, dtype=np.int64)
        self._states = torch.empty(num_rows, 0, 0)

    def keep(self, layout: StepLayout, starts: Rows, states: Tensor) -> None:
        """Of a step's states [T, W], or more behind them, those of each request from position `starts` [R] on."""
        counts = layout.ends - starts
        rows, positions = layout.rows.repeat(counts), positions_of(starts, counts)
        places = positions - self.firsts[rows]
        indices = positions + (layout.query_start_loc[:-1] - layout.starts).repeat(counts)
        if len(rows):
            self._make_room(int(places.max()) + 1, states)
            self._states[torch.from_numpy(rows), torch.from_numpy(places)] = states[torch.from_numpy(indices)]

    def at(self, rows: Rows, positions: Rows) -> Tensor:
        """[N, W] those of some rows [N] at positions [N]."""
        return self._states[torch.from_numpy(rows), torch.from_numpy(positions - self.firsts[rows])]

    def _make_room(self, count: int, states: Tensor) -> None:
        num_rows, room, width = self._states.shape
        if count > room:
            larger = states.new_empty(num_rows, max(count, 2 * room), states.shape[1])
            if width:
                larger[:, :room] = self._states
            self._states = larger


def positions_of(starts: Rows, counts: Rows) -> Rows:
    """[N] the positions of all tokens: `counts` [R] of each request, from `starts` [R] on."""
    before = counts.cumsum() - counts
    positions: Rows = np.arange(counts.sum()) + (starts - before).repeat(counts)
    return positions
