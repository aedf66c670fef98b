"""`Samplers`: one for each width of logits, of which a row has one for as long as it is a request's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.output import NewRequestData
from quire.worker.row_logits import RowLogits
from quire.worker.sampler import Sampler


class Samplers:
    """Made when the first row of a width comes, but for that of the model's tokens.

    Args:
        make: for logits of a width.

    Attributes:
        plain: of rows that have the model's tokens.
    """

    def __init__(self, make: Callable[[int], Sampler], logits: RowLogits, vocab_size: int) -> None:
        self._make = make
        self._logits = logits
        self.plain = make(vocab_size)
        self._of_width = {vocab_size: self.plain}
        self._of_row: dict[int, Sampler] = {}

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row."""
        width = int(self._logits.widths(np.array([row]))[0])
        if width not in self._of_width:
            self._of_width[width] = self._make(width)
        self._of_row[row] = self._of_width[width]
        self._of_row[row].add_request(row, request)

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        self._of_row.pop(row).remove_request(row)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """See `Sampler.reads_tokens`."""
        return any(sampler.reads_tokens(rows) for sampler in self._of_width.values())

    @property
    def replay(self) -> bool:
        """See `Sampler.replays`."""
        return any(sampler.replays for sampler in self._of_width.values())

    def of_row(self, row: int) -> Sampler:
        """Return that of a row."""
        return self._of_row[row]

    def of(self, rows: NDArray[np.int64]) -> Sampler:
        """That of rows of one width, of which there is one at least."""
        return self._of_width[int(self._logits.widths(rows[:1])[0])]
