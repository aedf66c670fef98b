# SPDX-License-Identifier: Apache-2.0
"""The whole command: one page with the speed of each weight format and, beside it, its accuracy."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare import accuracy, checkpoint, disturbance
from benchmarks.compare.accuracy import ROWS
from benchmarks.compare.disturbance import Times
from benchmarks.compare.records import Accuracy
from benchmarks.compare.reference import Reference
from tests.benchmarks.compare.fake_engine import FakeEngine

ENGINES = {
    "quire": FakeEngine("quire", precisions={"bf16": 16, "int8": 8}),
    "llama.cpp": FakeEngine("llama.cpp", precisions={"BF16": 16, "Q8_0": 8}),
}


def score(_: Reference, precision: str, limit_s: float) -> Accuracy:
    return Accuracy(1.5 if precision == "int8" else 0.25, 96.0, 20.0, 19.0)


def test_command_puts_accuracy_beside_speed_on_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(disturbance, "now", lambda: Times(next(ticks), 0.0, 0.0))
    monkeypatch.setattr(command, "engines_in", lambda folder: ENGINES)
    monkeypatch.setattr(checkpoint, "ensure", lambda folder, shape: folder)
    monkeypatch.setattr(accuracy, "SCORERS", dict.fromkeys(ROWS, score))
    page = tmp_path / "page.md"
    arguments = ["--folder", str(tmp_path), "--output", str(page), "--rounds", "1"]
    command.main([*arguments, "--engines", "quire", "llama.cpp", "--cases", "prefill", "decode-1", "batch"])
    lines = page.read_text().splitlines()
    (head,) = (line for line in lines if line.startswith("| engine | weights | prefill"))
    assert head.endswith("| 16 x 64 in / 32 out | RMS dp, %, SmolLM2-135M | RMS dp, %, Gemma 3 270M |")
    assert "| quire | int8 | 1.0 | 1.0 |  | 1.0 | 1.50 | 1.50 |" in lines
    assert "| llama.cpp | Q8_0 | 1.0 | 1.0 |  | 1.0 | 0.25 | 0.25 |" in lines
    assert "| quire | bf16, int8 cache | 0.25 | 96.0 | +5.26 % | 0.25 | 96.0 | +5.26 % |" in lines
