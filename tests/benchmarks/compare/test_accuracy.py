# SPDX-License-Identifier: Apache-2.0
"""Scores of rows: which are measured, what a failure costs, and how quire's are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare import accuracy, records
from benchmarks.compare.accuracy import ROWS, Reading, Session, compared
from benchmarks.compare.engines import engines_in
from benchmarks.compare.isa import ISAS
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Accuracy, Record, Score
from benchmarks.compare.reference import DEFAULT_TEXT, Reference, Text, text_of
from benchmarks.compare.workers.quire_reading import OPTIONS

FOUND = Accuracy(1.5, 96.0, 20.0, 19.0)


def session(tmp_path: Path, broken: Sequence[str] = (), **fields: object) -> Session:
    """Return a session whose scorers find the same for every row, but for those that are broken."""

    def score(_: Reference, precision: str, limit_s: float) -> Accuracy:
        if precision in broken:
            raise ProgramError(f"{precision} is too hard in {limit_s:.0f} s")
        return FOUND

    usual: dict[str, Any] = {
        "engines": ("machine", "llama.cpp"),
        "models": ("smollm2",),
        "formats": (),
        "text": Text(("LICENSE",), "words", 10),
        "isa": ISAS["native"],
        "folder": tmp_path,
        "limit_s": 9.0,
        "results": tmp_path / "results.jsonl",
        "scorers": dict.fromkeys(ROWS, score),
        "say": lambda line: None,
    }
    return Session(**usual | fields)


def scores(tmp_path: Path) -> list[Score]:
    return records.read_scores(tmp_path / "results.jsonl")


def test_measure_scores_each_row_once_and_keeps_rates(tmp_path: Path) -> None:
    rate = Record("quire", "bf16", "batch", 0, 1.0)
    records.append(tmp_path / "results.jsonl", [rate])
    for _ in range(2):
        assert not accuracy.measure(session(tmp_path))
    assert [one.precision for one in scores(tmp_path)] == list(ROWS["llama.cpp"])
    assert {(one.engine, one.model, one.accuracy) for one in scores(tmp_path)} == {
        ("llama.cpp", "SmolLM2-135M", FOUND)
    }
    assert records.read(tmp_path / "results.jsonl") == [rate]


def test_measure_in_pieces_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pieces = 1
    while accuracy.measure(session(tmp_path), max_runs=2):
        pieces += 1
    assert pieces == -(-len(ROWS["llama.cpp"]) // 2)
    assert [one.precision for one in scores(tmp_path)] == list(ROWS["llama.cpp"])


def test_measure_after_failure_leaves_only_that_row_out(tmp_path: Path) -> None:
    for _ in range(2):
        accuracy.measure(session(tmp_path, broken=["Q8_0"]))
    (failed,) = (one for one in scores(tmp_path) if one.error)
    assert (failed.precision, failed.accuracy, failed.error) == ("Q8_0", None, "Q8_0 is too hard in 9 s")
    assert len(scores(tmp_path)) == len(ROWS["llama.cpp"])


def test_measure_of_another_text_scores_all_rows_again(tmp_path: Path) -> None:
    for content in ("words", "other words"):
        accuracy.measure(session(tmp_path, text=Text(("LICENSE",), content, 10)))
    assert len(scores(tmp_path)) == 2 * len(ROWS["llama.cpp"])


def test_measure_of_named_formats_scores_these_alone(tmp_path: Path) -> None:
    accuracy.measure(session(tmp_path, engines=tuple(ROWS), formats=("int8, precise", "Q8_0")))
    found = [(one.engine, one.precision) for one in scores(tmp_path)]
    assert found == [("quire", "int8, precise"), ("llama.cpp", "Q8_0"), ("quire, files", "Q8_0")]


def test_rows_have_every_timed_format_and_its_options(tmp_path: Path) -> None:
    engines = engines_in(tmp_path)
    for name, rows in ROWS.items():
        timed = [one for one in engines[name].precisions if not one.startswith(("GPTQ", "AWQ"))]
        assert set(timed) <= set(rows)
    of_quire = {name for engine in ("quire", "quire, files") for name in ROWS[engine]}
    assert of_quire <= set(OPTIONS)
    assert set(accuracy.FORMATS) - set(ROWS["llama.cpp"]) <= set(OPTIONS)


def test_compared_counts_changes_of_probability_in_percent() -> None:
    truth = Reading([math.log(0.5), math.log(0.2)], [7, 8])
    found = compared(Reading([math.log(0.53), math.log(0.16)], [7, 9]), truth)
    assert found.rms_change_percent == pytest.approx(100 * math.sqrt((0.03**2 + 0.04**2) / 2))
    assert found.same_top_percent == 50.0
    assert found.reference_perplexity == pytest.approx(math.sqrt(10))
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.53 * 0.16))


def test_default_text_is_of_the_tree_and_named_by_path() -> None:
    text = text_of(DEFAULT_TEXT, 10)
    assert text.names == ("LICENSE", "docs/life_of_a_request.md", "docs/kv_cache.md")
    assert len(text.content) > 20_000, "ten chunks of 512 tokens"
    assert str(text) != str(text_of(DEFAULT_TEXT, 9))


def test_command_with_only_accuracy_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Session] = []
    monkeypatch.setattr(accuracy, "measure", lambda one, max_runs: asked.append(one))
    command.main(
        ["--only", "accuracy", "--folder", str(tmp_path), "--models", "gemma3", "--engines", "quire"]
    )
    assert [(one.engines, one.models) for one in asked] == [(["quire"], ["gemma3"])]
    assert list(tmp_path.iterdir()) == []
