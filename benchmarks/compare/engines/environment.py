# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.compare.engines.base import SET_UP_LIMIT_S
from benchmarks.compare.processes import ProgramError

TORCH = "torch==2.13.0"
"""The version that the package registry has as a build for CPUs; others bring gigabytes of CUDA."""

_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""
_REFUSED = ("nvidia-", "cuda-")


class Environment:
    """A virtual environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    @property
    def complete(self) -> bool:
        """Whether it was filled to the end."""
        return self._stamp.exists()

    def create(self) -> None:
        """Make it, empty."""
        processes.run([sys.executable, "-m", "venv", "--clear", self.folder], SET_UP_LIMIT_S)

    def finish(self) -> None:
        """Say that everything is in it."""
        self._stamp.touch()

    def install(self, requirements: Sequence[str], *options: str) -> None:
        """Install packages, after a look at what would come.

        Raises:
            ProgramError: pip failed, or the packages would bring CUDA along.
        """
        for name in self._planned(requirements, options):
            if name.lower().startswith(_REFUSED):
                raise ProgramError(f"{' '.join(requirements)} would install {name}")
        self._pip("install", *options, *requirements)

    def download_source(self, requirement: str, target: Path) -> None:
        """Fetch a package's source distribution alone."""
        self._pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(target), requirement)

    def uninstall(self, name: str) -> None:
        """Take a package out; those that need it must do without."""
        self._pip("uninstall", "--yes", name)

    def script(self, name: str) -> Path:
        """A command that a package has brought along."""
        return self.folder / "bin" / name

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """The installed versions of these packages."""
        found: dict[str, str] = json.loads(
            "".join(processes.lines([self.python, "-c", _VERSIONS, *names], 60))
        )
        return found

    def _planned(self, requirements: Sequence[str], options: Sequence[str]) -> list[str]:
        report = self.folder / "report.json"
        self._pip("install", "--dry-run", "--report", str(report), *options, *requirements)
        return [entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]]

    def _pip(self, *arguments: str) -> None:
        processes.run([self.python, "-m", "pip", "--quiet", *arguments], SET_UP_LIMIT_S)

    @property
    def _stamp(self) -> Path:
        return self.folder / ".complete"
