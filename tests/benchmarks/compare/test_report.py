"""The page of results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import report
from benchmarks.compare.isa import ISAS
from benchmarks.compare.records import Record
from tests.benchmarks.compare.fake_engine import FakeEngine

ENGINES = {
    "quire": FakeEngine("quire", precisions={"bf16": 16}),
    "llama.cpp": FakeEngine("llama.cpp", precisions={"BF16": 16}),
    "machine": FakeEngine("machine", precisions={"fp32": 32}),
}
RESULTS = [
    Record("machine", "fp32", "read", 0, 40e9),
    Record("beside probe", "bf16", "share", 0, 0.85),
    Record("quire", "bf16", "prefill", 0, 260.0),
    Record("quire", "bf16", "prefill", 1, 300.0),
    Record("quire", "bf16", "decode-1", 0, 34.0),
    Record("llama.cpp", "BF16", "prefill", 0, 140.0),
    Record("llama.cpp", "BF16", "decode-1", 0, 40.0),
    Record("llama.cpp", "BF16", "batch", 0, None, "not done after 60 s"),
]


def lines() -> list[str]:
    return report.page(RESULTS, ENGINES, ISAS["avx2"], "2026-11-21").splitlines()


def test_medians_failures_and_gaps_are_cells() -> None:
    assert "| quire | bf16 | 280 | 34.0 |  |  |" in lines()
    assert "| llama.cpp | BF16 | 140 | 40.0 |  | failed |" in lines()


def test_ratios_stand_beside_their_goals() -> None:
    assert "| bf16 | llama.cpp BF16 | 2.00 (reached: 1.5) | 0.85 (missed: 1.0) |  |  |" in lines()


def test_the_machine_and_the_share_of_its_bandwidth() -> None:
    assert any(
        "40.0 GB/s read; decoding one request, quire bf16 reads 85% of what a probe beside it does" in line
        for line in lines()
    )


def test_reasons_versions_and_settings_are_named() -> None:
    assert "- llama.cpp BF16 batch: not done after 60 s" in lines()
    assert "- quire (fake 1): not real" in lines()
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in line for line in lines())


def test_the_processor_and_its_vector_instructions(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Fast\ncpu family\t: 25\nmodel\t: 17\nflags\t: fpu fma avx2 f16c\n\n"
    )
    assert report.cpu(file) == "Fast (family 25, model 17; fma avx2 f16c)"
