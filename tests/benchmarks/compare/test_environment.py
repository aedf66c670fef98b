# SPDX-License-Identifier: Apache-2.0
"""Tests of the packages that may be installed into a peer engine's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare.engines.environment import Environment
from benchmarks.compare.engines.vllm import without
from benchmarks.compare.processes import ProgramError


class Planned(Environment):
    """An environment whose pip would install these packages, and writes down what it is told."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__(folder)
        self._names = names
        self.told: list[str] = []

    def _pip(self, *arguments: str) -> None:
        self.told.append(" ".join(arguments))
        report = {"install": [{"metadata": {"name": name}} for name in self._names]}
        (self.folder / "report.json").write_text(json.dumps(report))


def test_packages_are_looked_at_before_they_come(tmp_path: Path) -> None:
    environment = Planned(tmp_path, ["torch", "numpy"])
    environment.install(["torch==2.13.0"])
    assert environment.told == [
        f"install --dry-run --report {tmp_path}/report.json torch==2.13.0",
        "install torch==2.13.0",
    ]


def test_cuda_is_refused(tmp_path: Path) -> None:
    environment = Planned(tmp_path, ["torch", "nvidia-cublas"])
    with pytest.raises(ProgramError, match="torch would install nvidia-cublas"):
        environment.install(["torch"])
    assert all("--dry-run" in line for line in environment.told)


def test_requirements_of_extras_and_unwanted_packages_omitted() -> None:
    requirements = ["regex", "torchaudio; python_version > '3'", 'pandas; extra == "bench"', "torch==2.13.0"]
    assert without(requirements, ("torchaudio",)) == ["regex", "torch==2.13.0"]
