# SPDX-License-Identifier: Apache-2.0
"""Running programs of other environments: their lines as they come, and nothing left behind.

Invariant: a program runs in a process group of its own, which is ended with it, whatever ended it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_FROM_OUTSIDE = ("OMP_", "GOMP_", "KMP_", "QUIRE_", "ONEDNN_", "DNNL_", "ATEN_", "MKL_", "PYTHONPATH")
"""Settings of the caller that would make one engine's run unlike another's."""


class ProgramError(Exception):
    """A program failed or took too long; the message is the end of what it said."""


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what steers engines, and with these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_OUTSIDE)}
    return kept | dict(settings)


def run(command: Sequence[str | Path], limit_s: float, settings: Mapping[str, str] | None = None) -> None:
    """Run a program to its end.

    Raises:
        ProgramError: see `lines`.
    """
    for _ in lines(command, limit_s, settings):
        pass


def lines(
    command: Sequence[str | Path], limit_s: float, settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The lines that a program prints.

    Raises:
        ProgramError: it is not there, ended with an error or ran for more than `limit_s` seconds.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        process = _start(command, complaints, settings or {})
        late = threading.Event()

        def expire() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as printed:
                yield from printed
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if late.is_set():
            raise ProgramError(f"not done after {limit_s:.0f} s")
        if status:
            raise ProgramError(_last_line(complaints) or f"{Path(command[0]).name} ended with {status}")


def _start(
    command: Sequence[str | Path], complaints: IO[str], settings: Mapping[str, str]
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            cwd=ROOT,
            env=environment(settings),
            start_new_session=True,
        )
    except OSError as error:
        raise ProgramError(f"{command[0]}: {error.strerror}") from error


def _end(process: subprocess.Popen[str]) -> None:
    """End whatever is left of the program's group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_line(complaints: IO[str]) -> str:
    complaints.seek(0)
    written = [line.strip() for line in complaints if line.strip()]
    return written[-1] if written else ""
