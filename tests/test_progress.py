# SPDX-License-Identifier: Apache-2.0
"""Progress off a terminal: a line every few seconds, with what is known."""

from __future__ import annotations

import pytest

from quire.progress import Progress


def lines_of(
    times: list[float], capsys: pytest.CaptureFixture[str], total: int | None, skipped: int = 0
) -> list[str]:
    now = 0.0
    progress = Progress(total, "Work", "units", skipped=skipped, clock=lambda: now)
    for now in times:  # noqa: B007
        progress.update()
    progress.close()
    return capsys.readouterr().err.splitlines()


def test_line_has_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([4, 8, 9, 16], capsys, total=100) == [
        "Work: 2/100 units, 8 s, 0.25 units/s, 6 min 32 s left",
        "Work: 4/100 units, 16 s, 0.25 units/s, 6 min 24 s left",
    ]


def test_units_of_earlier_runs_do_not_count_for_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([10], capsys, total=7300, skipped=99) == [
        "Work: 100/7300 units, 10 s, 0.1 units/s, 20 h 0 min left"
    ]


def test_last_line_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([0, 2], capsys, total=2) == ["Work: 2/2 units, 2 s, 1 units/s"]


def test_unknown_total_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of([6], capsys, total=None) == ["Work: 1 units, 6 s, 0.167 units/s"]


def test_bytes_are_shown_in_units_and_their_end_is_silent() -> None:
    lines: list[str] = []
    now = 0.0
    progress = Progress(
        3_000_000_000, "Load", "GB", per_unit=1e9, ends=False, say=lines.append, clock=lambda: now
    )
    for now in (6.0, 7.0):  # noqa: B007
        progress.update(1_500_000_000)
    progress.close()
    assert lines == ["Load: 1.5/3.0 GB, 6 s, 0.25 GB/s, 6 s left"]
