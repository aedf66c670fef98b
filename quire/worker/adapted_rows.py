# SPDX-License-Identifier: Apache-2.0
"""Adapters of the rows, as the batch calls them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.output import NewRequestData


class AdaptedRows(Protocol):
    """Adapters of the rows: weights of a request beside the model's, in a slot of each layer."""

    @property
    def add_tokens(self) -> bool:
        """True once any row has had an adapter with added tokens."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Assign a row to a request, with or without an adapter."""

    def remove_request(self, row: int) -> None:
        """Free a row."""

    def num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens that the adapter of each row adds."""

    def num_added_of(self, request: NewRequestData) -> int:
        """Return the number of tokens that a request's adapter adds."""

    def slots_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the slot of each row, negative without an adapter; None if no row has one."""
