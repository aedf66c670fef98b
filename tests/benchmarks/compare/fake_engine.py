# SPDX-License-Identifier: Apache-2.0
"""Engine that prints given lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.compare.cases import CASES
from benchmarks.compare.engines.base import Rate, Task
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ProgramError


class FakeEngine:
    """Every case has rate 1; `broken` are cases that end the run, "set-up" one that is never ready."""

    precisions: ClassVar[Mapping[str, int]] = {"bf16": 16}
    cases: ClassVar[Sequence[str]] = tuple(CASES)
    notes = "not real"

    def __init__(self, name: str, broken: Sequence[str] = (), precisions: Mapping[str, int] | None = None):
        self.name = name
        self.tasks: list[Task] = []
        self._broken = broken
        if precisions:
            self.precisions = precisions  # type: ignore[misc]

    def set_up(self, isa: Isa) -> None:
        if "set-up" in self._broken:
            raise ProgramError("no such package")

    def prepare(self, checkpoint: Path, precision: str) -> None:
        pass

    def measure(self, task: Task) -> Iterator[Rate]:
        self.tasks.append(task)
        for case in task.cases:
            if case in self._broken:
                raise ProgramError(f"{case} is too hard")
            yield Rate(case, 1.0)

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}
