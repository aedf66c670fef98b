# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.gpu.bench` from end to end on a CPU, with tiny shapes, and the arithmetic of its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import bench, imports
from benchmarks.gpu.bench import Measurement
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.kernel_speed import attention_limit_s
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.measurements import QUANTIZED, Bench, measurements
from benchmarks.gpu.rows import Goal, Row
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_05B
from benchmarks.gpu.target import Target

H100 = Limits(3.0e12, 990e12)


@pytest.mark.more
def test_a_dry_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    code = bench.main(["--device", "cpu", "--tiny", "--out", str(page)])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    text = page.read_text()
    assert "Not measured" not in text
    rows = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 6 + 3 + 3 + 2 * 3 * 4 + 3 + 2 + 2 * 3
    assert sum("the device is idle" in line for line in text.splitlines()) == 2
    assert all(re.search(r"\d", row.split("|")[3]) for row in rows)


def test_the_limits_are_those_of_the_specification() -> None:
    assert H100.decode_s(LLAMA_8B, 1, 0) == pytest.approx(5.0e-3, rel=0.01)
    assert H100.decode_s(LLAMA_8B, 64, 1024) == pytest.approx(7.9e-3, rel=0.01)
    assert H100.decode_s(LLAMA_8B, 256, 1024) == pytest.approx(16.5e-3, rel=0.01)
    assert H100.context_bytes(LLAMA_8B, 1) / H100.bytes_per_s == pytest.approx(4.37e-8, rel=0.01)
    assert H100.decode_s(LLAMA_8B, 1, 0, QUANTIZED["int4"][1]) == pytest.approx(1.48e-3, rel=0.01)
    assert attention_limit_s(H100, LLAMA_8B, [(1, 16384)]) == pytest.approx(16384 * 4096 / 3.0e12)
    assert attention_limit_s(H100, LLAMA_8B, [(2048, 2048)]) == pytest.approx(
        4 * 4096 * 2048 * 2049 / 2 / 990e12
    )
    assert H100.decode_s(QWEN_05B, 1, 0) == pytest.approx(0.33e-3, rel=0.02)
    assert 5.5e4 < H100.prefill_tokens_per_s(LLAMA_8B, 2048) < 7.5e4


@pytest.mark.parametrize(
    ("row", "percent", "verdict"),
    [
        (Row("", "ms", 8.0, 4.0), 50, ""),
        (Row("", "tok/s", 30.0, 40.0, Goal("percent", 75)), 75, "met"),
        (Row("", "ms", 10.0, 4.0, Goal("percent", 75)), 40, "missed"),
        (Row("", "ms", 6.4, 5.0, Goal("at most", 6.4)), 78.125, "met"),
        (Row("", "ms", 6.5, 5.0, Goal("at most", 6.4)), 5 / 0.065, "missed"),
        (Row("", "tok/s", 12_000, goal=Goal("at least", 11_000)), None, "met"),
        (Row("", "tok/s", 10_000, goal=Goal("at least", 11_000)), None, "missed"),
    ],
)
def test_percent_and_verdict(row: Row, percent: float | None, verdict: str) -> None:
    assert row.percent == (None if percent is None else pytest.approx(percent))
    assert row.verdict == verdict


def test_failed_or_late_measurement_affects_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("half", "ms", 2.0, goal=Goal("percent", 3.0))

    def good() -> Iterator[Row]:
        yield Row("fine", "ms", 1.0)

    def breaks() -> Iterator[Row]:
        yield row
        raise ValueError("out of luck")

    times = iter([0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 5.0, 6.0, 99.0])
    found = [Measurement(name, run) for name, run in (("a", good), ("b", breaks), ("c", good), ("d", good))]
    journal = Journal(tmp_path / "journal")
    assert bench.run(found, 10.0, journal, clock=lambda: next(times))
    entries = Journal(tmp_path / "journal").entries
    assert [Row.of(fact) for fact in entries["b"].facts] == [row]
    assert [len(entry.facts) for entry in entries.values()] == [1, 1, 1, 0]
    assert "ValueError: out of luck" in capsys.readouterr().out
    assert bench._report(journal, tmp_path / "page.md") == 1
    text = (tmp_path / "page.md").read_text()
    assert "Not measured: b (ValueError: out of luck).\nNot measured: d (no time left of 10 s)." in text
    assert "| fine |" in text


def test_single_measurement_can_be_selected(tmp_path: Path) -> None:
    found = measurements(Bench(Target(torch.device("cuda"), tiny=False), H100, tmp_path))
    names = [measurement.name for measurement in found]
    assert names[:5] == ["8B", "8B, mixed and long", "attention", "linears", "0.5B"]
    assert names[5:8] == ["sampling", "profile", "start"]
    assert names[8:] == ["batch-invariant", "int8", "int4", "fp8", "fp8 by Triton"]
    assert [measurement.name for measurement in bench.select(found, ["int8", "8B"])] == ["8B", "int8"]
    with pytest.raises(SystemExit, match="no measurement 'int3'; there are '8B'"):
        bench.select(found, ["int3"])


def test_missing_packages_are_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name in ("msgspec", "tqdm") else object())
    assert bench.main(["--device", "cpu", "--tiny"]) == 2
    assert "missing: tqdm msgspec." in capsys.readouterr().err
