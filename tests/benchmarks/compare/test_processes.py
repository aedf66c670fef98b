# SPDX-License-Identifier: Apache-2.0
"""Programs of other environments: their lines, their failures, their end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.compare import processes
from benchmarks.compare.processes import ProgramError


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_lines_come_with_the_settings_and_without_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    program = "import os; print(os.environ['FAST']); print(os.environ.get('OMP_WAIT_POLICY'))"
    assert list(processes.lines(python(program), 60, {"FAST": "yes"})) == ["yes\n", "None\n"]


def test_error_is_the_last_line_of_the_program() -> None:
    with pytest.raises(ProgramError, match=r"^ValueError: no$"):
        processes.run(python("print('fine'); raise ValueError('no')"), 60)


def test_silent_program_is_named() -> None:
    with pytest.raises(ProgramError, match=f"^{Path(sys.executable).name} ended with 3$"):
        processes.run(python("raise SystemExit(3)"), 60)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ProgramError, match="no-such-program: No such file"):
        processes.run(["no-such-program"], 60)


def test_slow_program_ends_with_its_children() -> None:
    """The lines end only when the inner `sleep`, which holds the pipe too, is gone."""
    with pytest.raises(ProgramError, match="not done after 0 s"):
        processes.run(["sh", "-c", "sleep 1000 & sleep 1000"], 0.2)


def test_nothing_is_left_when_the_reader_goes_away() -> None:
    reader = processes.lines(python("import os, time; print(os.getpid(), flush=True); time.sleep(1000)"), 60)
    process_id = int(next(reader))
    reader.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
