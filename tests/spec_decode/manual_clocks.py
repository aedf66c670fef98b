# SPDX-License-Identifier: Apache-2.0
"""Clocks that a test moves by hand."""

from __future__ import annotations

from collections.abc import Sequence


class ManualClocks:
    """`Clocks` of a process by itself.

    Attributes:
        seconds: what they show.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        return list(seconds)
