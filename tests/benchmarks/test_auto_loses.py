"""Two engines take turns, and what is told is a ratio of the same round."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import auto_loses


def test_engines_take_turns_at_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], list[tuple[str, int]]()
    seconds = {"without": 2.0, "with": 1.0}

    def generate(engine: Any, number: int) -> int:
        asked.append((engine, number))
        now[0] += seconds[engine] * (1 + number)
        return 8

    monkeypatch.setattr(auto_loses.time, "perf_counter", lambda: now[0])
    engines: Any = ["without", "with"]
    assert auto_loses.ratios(engines, generate, 2) == [2.0, 2.0]
    assert [engine for engine, _ in asked] == ["with", "without", "without", "with", "with", "without"]
