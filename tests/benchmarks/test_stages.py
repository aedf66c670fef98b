# SPDX-License-Identifier: Apache-2.0
"""Test of the gain of pipeline stages that work at the same time, in simulated time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.routing import CostModel
from benchmarks.stages import WAYS, config_of, simulated, write_model


def test_two_stages_work_nearly_all_of_the_time(tmp_path: Path) -> None:
    """And by turns half of it, each."""
    write_model(tmp_path, 2, 64)
    turns, at_once = (
        simulated(config_of(tmp_path, 2, overlapped, "null"), 16, CostModel()) for overlapped in WAYS.values()
    )
    assert all(abs(share - 0.5) < 0.01 for share in turns.busy)
    assert min(at_once.busy) > 0.9
    assert at_once.tokens_per_s > 1.1 * turns.tokens_per_s
