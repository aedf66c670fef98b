# SPDX-License-Identifier: Apache-2.0
"""Phases of a start: they add up, warm-up does not count, and a real process has all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.bench.startup import first_token, measure
from quire.bench.startup_process import Stopwatch
from quire.config import EngineConfig
from quire.errors import StartupError

PHASES = {
    "interpreter",
    "imports of quire",
    "tokenizer",
    "import of torch",
    "weights",
    "warm-up",
    "KV cache",
    "first step",
}


def test_warm_up_does_not_count_and_phases_have_medians() -> None:
    runs = iter([{"a": 9.0, "b": 9.0}, {"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 1.0}, {"a": 3.0, "b": 2.0}])
    result = measure(EngineConfig.from_args(), 1, 3, lambda config: next(runs))
    assert result.totals == [4.0, 3.0, 5.0]
    assert result.medians() == {"a": 2.0, "b": 2.0}
    assert result.as_json()["median_startup_time"] == 4.0
    assert result.lines()[-1].split() == ["command", "to", "first", "token", "4.00", "(3.00", "to", "5.00)"]


def test_a_phase_is_all_that_happened_since_the_one_before() -> None:
    ticks = itertools.count(10.0)
    stopwatch = Stopwatch(8.0, lambda: next(ticks))
    module = SimpleNamespace(load=lambda path, *, fast: (path, fast))
    ended: list[str] = []
    stopwatch.watch(module, "load", "weights", lambda: ended.append("weights"))
    stopwatch.end("imports")
    assert module.load("x", fast=True) == ("x", True)
    assert ended == ["weights"]
    assert stopwatch.phases == {"imports": 2.0, "weights": 1.0}


@pytest.mark.more
def test_a_fresh_process_reports_every_phase(tiny_model: Callable[[str], Path]) -> None:
    run = first_token(EngineConfig.from_args(model=str(tiny_model("llama")), max_model_len=64))
    assert set(run) == PHASES
    assert min(run.values()) >= 0.0


def test_failed_start_names_its_reason(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        first_token(EngineConfig.from_args(model=str(tmp_path)))
