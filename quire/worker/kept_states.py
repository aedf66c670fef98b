"""Hidden states that steps leave, for whoever is to guess behind them.

Invariant: of each row, those of the last positions that were kept; those of wrong guesses are written over by what the
next step computes in their places.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.worker.devices import Transfers
from quire.worker.inputs import StepLayout

Rows = NDArray[np.int64]


class KeptStates:
    """A ring of `room` states [W] for each of `num_rows` rows, on the device."""

    def __init__(
        self, num_rows: int, room: int, width: int, dtype: torch.dtype, transfers: Transfers
    ) -> None:
        self._room = room
        self._transfers = transfers
        self._states = torch.empty(num_rows * room, width, dtype=dtype, device=transfers.torch_device)

    def keep(self, layout: StepLayout, starts: Rows, states: Tensor) -> None:
        """Of a step's states [T, W], or more behind them, those of each request from position `starts` [R] on."""
        counts = layout.ends - starts
        positions = positions_of(starts, counts)
        if not len(positions):
            return
        indices = positions + (layout.query_start_loc[:-1] - layout.starts).repeat(counts)
        numbers = np.stack((self._places(layout.rows.repeat(counts), positions), indices))
        places, sources = self._transfers.upload(torch.from_numpy(numbers))
        self._states.index_copy_(0, places, states.index_select(0, sources))

    def at(self, rows: Rows, positions: Rows) -> Tensor:
        """[N, W] those of some rows [N] at positions [N]."""
        places = self._transfers.upload(torch.from_numpy(self._places(rows, positions)))
        return self._states.index_select(0, places)

    def _places(self, rows: Rows, positions: Rows) -> Rows:
        places: Rows = rows * self._room + positions % self._room
        return places


def positions_of(starts: Rows, counts: Rows) -> Rows:
    """[N] the positions of all tokens: `counts` [R] of each request, from `starts` [R] on."""
    before = counts.cumsum() - counts
    positions: Rows = np.arange(counts.sum()) + (starts - before).repeat(counts)
    return positions
