"""One measurement of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One op at one shape. `flops` and `num_bytes` are what a call cannot do without."""

    name: str
    rows: int
    run: Callable[[], object]
    flops: float
    num_bytes: float
