# SPDX-License-Identifier: Apache-2.0
"""Interface of an engine for the runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from benchmarks.compare.isa import Isa

SET_UP_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Rate:
    """Rate of an engine in a case."""

    case: str
    rate: float


@dataclass(frozen=True)
class Task:
    """One run of an engine: its model is loaded once and the cases are measured once each."""

    isa: Isa
    precision: str
    cases: Sequence[str]
    round: int
    limit_s: float


class Engine(Protocol):
    """An engine, its environment and its form of the checkpoint.

    Every method raises `ProgramError` if a program it needs fails. What was set up or prepared once is kept.
    """

    name: str
    precisions: ClassVar[Mapping[str, int]]
    """The names of its weight formats, and how many bits a weight has."""
    cases: ClassVar[Sequence[str]]
    notes: str
    """How it was set up, for whoever wants to judge or repeat the result."""

    def set_up(self, isa: Isa) -> None:
        """Make its environment."""
        ...

    def prepare(self, checkpoint: Path, precision: str) -> None:
        """Make its form of the checkpoint."""
        ...

    def measure(self, task: Task) -> Iterator[Rate]:
        """Run the cases; a rate is handed out as soon as it is known."""
        ...

    def versions(self) -> dict[str, str]:
        """Package -> installed version."""
        ...
