"""Whose clock counts where time decides how much is guessed.

Invariant: what is decided follows from numbers that all ranks of a model have, so all of them guess alike: they ask the
same drafters for as many tokens, and cross each other as often.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol


class Clocks(Protocol):
    """Measures durations."""

    def now(self) -> float:
        """Seconds since some moment."""

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """Durations that this rank has measured -> those that count; ranks that share a model all ask, as often."""


class OwnClock:
    """That of a process which decides for itself."""

    def now(self) -> float:
        return time.perf_counter()

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        return list(seconds)
