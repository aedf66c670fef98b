# SPDX-License-Identifier: Apache-2.0
"""Loads: distributions, files with every kind of mistake."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.simulate.load import LoadDescription, parse_lengths, read_load
from tests.fixtures.folded import folded

GOOD = '{"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 3}'


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("3-9", 3, 9), ("~100", 1, 2000)])
def test_lengths_lie_in_their_range(text: str, low: int, high: int) -> None:
    lengths, generator = parse_lengths(text, "--x"), random.Random(0)
    drawn = [lengths.draw(generator) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    if text == "~100":
        assert 90 < statistics.median(drawn) < 110


@folded("text", ["", "0", "-3", "9-3", "1e3", "~0", "~", "5-", "99999999999", "٣", "5\n"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens is"):
        parse_lengths(text, "--prompt-tokens")


@folded(
    "changes",
    [
        {"num_requests": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"prefix_tokens": -1},
        {"prefix_groups": 0},
        {"num_requests": 10**9},
    ],
)
def test_descriptions_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        LoadDescription(**changes).requests()  # type: ignore[arg-type]


def test_file_gives_requests_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    shared = '{"arrival_s": %s, "prompt_tokens": 10, "output_tokens": 3, "prefix": "a", "prefix_tokens": %d}'
    file.write_text(f"{shared % (2, 8)}\n\n{GOOD}\n{shared % (1, 6)}\n")
    found = read_load(file)
    assert [one.arrival_s for one in found] == [0.5, 1.0, 2.0]
    assert [len(one.prompt_token_ids) for one in found] == [10, 10, 10]
    first, second = found[1].prompt_token_ids, found[2].prompt_token_ids
    assert first[:6] == second[:6]
    assert first[6:8] != second[6:8]


@folded(
    "line",
    [
        "{",
        "[]",
        "null",
        '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1e9}',
        '{"arrival_s": 0, "prompt_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "promt": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix": "a", "prefix_tokens": 2}',
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_tokens": 1}',
        '{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
    ],
)
def test_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_load(file)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "load.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"load\.jsonl"):
        read_load(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_load(tmp_path / "none")
