# SPDX-License-Identifier: Apache-2.0
"""Engines take turns; ratios are of the same round, and the first round does not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import auto_loses


def test_engines_take_turns_at_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], list[tuple[str, int]]()
    seconds = {"plain": 2.0, "auto": 1.0, "all wrong": 4.0}

    def generate(engine: Any, number: int) -> Any:
        asked.append((engine, number))
        now[0] += seconds[engine] * (99 if number == 0 else number)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * 4)])] * 2

    monkeypatch.setattr(auto_loses.time, "perf_counter", lambda: now[0])
    engines: Any = {name: name for name in seconds}
    found = auto_loses.ratios(engines, generate, 2)
    assert found == {"auto": [2.0, 2.0], "all wrong": [0.5, 0.5]}
    assert [engine for engine, _ in asked] == [
        *("plain", "auto", "all wrong"),
        *("auto", "all wrong", "plain"),
        *("all wrong", "plain", "auto"),
    ]
    assert auto_loses.cell([0.5, 2.0, 1.0]) == "1.000x (0.500 to 2.000)"
