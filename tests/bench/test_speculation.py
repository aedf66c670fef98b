# SPDX-License-Identifier: Apache-2.0
"""Benchmark of speculation: order of timings, comparison of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.backends import Backend, Prompts
from quire.bench.speculation import measure
from quire.errors import EngineError
from tests.bench.fake_backend import FakeBackend, FakeClock

BATCHES = [[[1], [2]], [[3], [4]], [[5], [6]]]


def test_each_rate_is_timed_in_turns_with_none() -> None:
    clock, log = FakeClock(), list[str]()
    plain = FakeBackend("plain", clock, [4.0], log)

    def make(recorded: str, rate: float) -> Backend:
        outputs = json.loads(Path(recorded).read_text())
        assert outputs[3] == {"prompt_token_ids": [4], "token_ids": [0] * 8}
        return FakeBackend(f"with {rate}", clock, [4.0 - 2 * rate], log)

    result = measure(plain, make, BATCHES, 8, [0.0, 1.0], clock)
    expected = ["plain"] * 3
    for name in ("with 0.0", "with 1.0"):  # all prompts once, for its prefix cache, and a batch whole
        expected += [name] * (3 + 1) + ["plain", name] * 3
    assert log == expected
    assert result.lines() == [
        "acceptance 0.00:  1.00x (4.00 -> 4.00 output tokens/s)",
        "acceptance 1.00:  2.00x (4.00 -> 8.00 output tokens/s)",
    ]


class DifferentAnswers(FakeBackend):
    def generate(self, prompts: Prompts, output_len: int) -> list[list[int]]:
        return [[1] * output_len for _ in prompts]


def test_other_answers_are_an_error() -> None:
    clock = FakeClock()
    plain = FakeBackend("plain", clock, [1.0])
    with pytest.raises(EngineError, match="different tokens with drafts"):
        measure(
            plain, lambda recorded, rate: DifferentAnswers("liar", clock, [1.0]), BATCHES, 8, [1.0], clock
        )
