# SPDX-License-Identifier: Apache-2.0
"""Start of engine core processes, and a spare process that has imported its modules before a core is wanted.

Invariant: a spare process has done nothing but imports, so a core in it is like any other. It ends with the process
that keeps it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.core_process import SPARE
from quire.processes import start_python

SPIN_COUNT = 1000
"""Spins of an idle torch thread before it sleeps, some 20 microseconds. OpenMP's default of milliseconds wastes cores
and slows the kernels' threads (docs/performance.md).
"""
PROGRAM = "quire.engine.core_process"
IN_PROCESS = "uni"
"""Executor that computes in the core's process, which imports torch."""


def core_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a core's environment: torch's threads spin SPIN_COUNT times, unless the user has set how they wait."""
    if environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return dict(environment)
    return {**environment, "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@contextmanager
def openmp_spin_count() -> Iterator[None]:
    """Set the spin count while OpenMP is loaded, which reads it then; the user's own settings are kept.

    No effect if the user's program has loaded OpenMP before.
    """
    added = core_environment(os.environ).items() - os.environ.items()
    os.environ.update(added)
    try:
        yield
    finally:
        for name, _ in added:
            os.environ.pop(name, None)


def start_core(config: EngineConfig, directory: Path) -> subprocess.Popen[bytes]:
    """Start a core in a private directory that has its configuration, in the spare process if that suits it.

    Raises:
        OSError: the machine refuses a process.
    """
    executor = config.parallel.distributed_executor_backend
    spare = _spares.pop() if _spares else None
    if spare is not None:
        # A replica's threads inherit the processors that it is given, and other executors compute elsewhere.
        if executor == IN_PROCESS and config.share is None and spare.become(directory):
            return spare.process
        spare.close()
    return _start([str(directory), str(os.getpid()), executor], os.environ, stdin=subprocess.DEVNULL)


def keep_spare(environment: Mapping[str, str]) -> None:
    """Start a process that becomes the next core of this process, or ends with it.

    Raises:
        OSError: the machine refuses a process.
    """
    _spares.append(SpareCore(environment))


class SpareCore:
    """Core process without a directory.

    Raises:
        OSError: the machine refuses a process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = _start([SPARE, str(os.getpid()), IN_PROCESS], environment, stdin=subprocess.PIPE)

    def become(self, directory: Path) -> bool:
        """Let it become the core of a directory; False if it has ended."""
        assert self.process.stdin is not None, "it is a pipe"
        if self.process.poll() is not None:
            return False
        try:
            self.process.stdin.write(os.fsencode(directory) + b"\n")
            self.process.stdin.close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End it; nothing is lost."""
        assert self.process.stdin is not None, "it is a pipe"
        with suppress(OSError):  # what was written did not reach it
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()


_spares: list[SpareCore] = []
"""At most one, of this process."""


def _start(args: list[str], environment: Mapping[str, str], *, stdin: int) -> subprocess.Popen[bytes]:
    return start_python(["-m", PROGRAM, *args], core_environment(environment), stdin=stdin)
