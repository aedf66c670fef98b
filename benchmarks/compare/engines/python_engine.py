# SPDX-License-Identifier: Apache-2.0
"""Engines that are Python packages: an environment, and a worker that runs in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.compare import processes
from benchmarks.compare.cases import CASES
from benchmarks.compare.engines.base import Rate, Task
from benchmarks.compare.engines.environment import Environment
from benchmarks.compare.isa import Isa
from benchmarks.compare.workers.worker import MARK


class PythonEngine:
    """An engine that `workers/<worker>.py` drives; it reads the checkpoint as it is.

    Subclasses say what is installed and, where a checkpoint must be converted, how.
    """

    name: str
    worker: str
    precisions: ClassVar[Mapping[str, int]]
    packages: Sequence[str]
    notes: str
    cases: ClassVar[Sequence[str]] = tuple(CASES)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = Environment(folder / "venv")
        self._checkpoint = Path()

    def set_up(self, isa: Isa) -> None:
        if not self._environment.complete:
            self._environment.create()
            self._install(self._environment)
            self._environment.finish()

    def prepare(self, checkpoint: Path, precision: str) -> None:
        self._checkpoint = checkpoint

    def measure(self, task: Task) -> Iterator[Rate]:
        worker = ("-m", f"benchmarks.compare.workers.{self.worker}")
        arguments: tuple[str | Path, ...] = (
            self._model(task.precision),
            task.precision,
            *task.cases,
            "--seed",
            str(task.round),
        )
        command: list[str | Path] = [self._environment.python, *worker, *arguments]
        yield from rates(processes.lines(command, task.limit_s, self._settings(task.isa)))

    def versions(self) -> dict[str, str]:
        return self._environment.versions(self.packages)

    def _install(self, environment: Environment) -> None:
        raise NotImplementedError

    def _settings(self, isa: Isa) -> Mapping[str, str]:
        """The environment variables that hold it to an instruction set."""
        return isa.environment

    def _model(self, precision: str) -> Path:
        return self._checkpoint


def rates(lines: Iterable[str]) -> Iterator[Rate]:
    """Yield the rates that a worker has printed, and skip the output of its engine."""
    for line in lines:
        if line.startswith(MARK):
            yield Rate(**json.loads(line.removeprefix(MARK)))
