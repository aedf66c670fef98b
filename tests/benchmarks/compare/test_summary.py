# SPDX-License-Identifier: Apache-2.0
"""Medians and ratios: which formats are compared, and with which goal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare.checkpoint import DENSE
from benchmarks.compare.goals import FILES, GOALS
from benchmarks.compare.records import Record
from benchmarks.compare.summary import medians, ratios
from tests.benchmarks.compare.fake_engine import FakeEngine

ENGINES = {
    "quire": FakeEngine("quire", precisions={"bf16": 16, "int8": 8, "int4": 4}),
    "llama.cpp": FakeEngine("llama.cpp", precisions={"BF16": 16, "Q8_0": 8, "Q4_0": 4}),
    "vllm": FakeEngine("vLLM", precisions={"bf16": 16, "fp32": 32}),
}
POSITIVE = st.floats(0.1, 1e4)


def test_the_median_of_the_rounds_without_failures() -> None:
    rates = [3.0, None, 100.0, 4.0]
    results = [Record("quire", "bf16", "batch", number, rate) for number, rate in enumerate(rates)]
    assert medians(results) == {("quire", "bf16", "batch"): 4.0}


@given(st.lists(POSITIVE, min_size=1, max_size=7), st.floats(0.5, 4.0))
def test_a_machine_faster_by_a_factor_changes_no_ratio(rates: list[float], factor: float) -> None:
    def ratio(scale: float) -> float:
        own = [Record("quire", "int8", "batch", i, 2 * rate * scale) for i, rate in enumerate(rates)]
        peer = [Record("llama.cpp", "Q8_0", "batch", i, rate * scale) for i, rate in enumerate(rates)]
        (one,) = ratios(medians([*own, *peer]), ENGINES, DENSE)
        return one.ratio

    assert ratio(factor) == pytest.approx(2.0)


def test_formats_are_compared_at_the_same_bits() -> None:
    rates = {("quire", p, "prefill"): 10.0 for p in ("bf16", "int8", "int4")}
    rates |= {("llama.cpp", p, "prefill"): rate for p, rate in (("BF16", 5.0), ("Q8_0", 4.0), ("Q4_0", 10.0))}
    found = {(one.precision, one.peer_precision): one for one in ratios(rates, ENGINES, DENSE)}
    assert {pair: one.ratio for pair, one in found.items()} == {
        ("bf16", "BF16"): 2.0,
        ("int8", "Q8_0"): 2.5,
        ("int4", "Q4_0"): 1.0,
    }
    assert [one.reached for one in found.values()] == [True, True, False]


def test_files_are_compared_with_engines_that_serve_the_same() -> None:
    rates = {("quire, files", p, "batch"): 19.0 for p in FILES} | {("quire", "int4", "batch"): 20.0}
    rates |= {("llama.cpp", p, "batch"): rate for p, rate in (("Q8_0", 5.0), ("Q4_0", 9.5), ("Q4_K_M", 10.0))}
    found = [one for one in ratios(rates, ENGINES, DENSE) if one.precision in FILES]
    assert {one.precision: one.reached for one in found} == dict.fromkeys(FILES, True) | {"Q4_K_M": False}
    assert {(one.peer, one.peer_precision) for one in found} == set(FILES.values())


def test_vllm_counts_with_its_best_type_against_16_bits_only() -> None:
    rates = {("quire", "bf16", "batch"): 60.0, ("quire", "int8", "batch"): 90.0}
    rates |= {("vllm", "bf16", "batch"): 5.0, ("vllm", "fp32", "batch"): 20.0}
    (one,) = ratios(rates, ENGINES, DENSE)
    assert (one.precision, one.peer_precision, one.ratio, one.reached) == ("bf16", "fp32", 3.0, True)


def test_comparison_without_goal_is_neither_reached_nor_missed() -> None:
    rates = {("quire", "bf16", "prefill"): 2.0, ("vllm", "bf16", "prefill"): 1.0}
    assert [one.reached for one in ratios(rates, ENGINES, DENSE)] == [None]


@pytest.mark.parametrize(("shape", "count"), [(DENSE, 13), ("dummy-qwen3-moe", 6)])
def test_goals_are_one_for_each_comparison(shape: str, count: int) -> None:
    assert len({(one.peer, one.case, one.bits) for one in GOALS[shape]}) == len(GOALS[shape]) == count
