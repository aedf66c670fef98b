"""Whole engines of several stages say what one process says, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.errors import EngineError
from tests.executor.test_multiproc import PARAMS, executor_of, is_gone, numbers, run, said, started
from tests.fixtures.quick import quick
from tests.fixtures.thread_ranks import ThreadRanks

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two": ({"pipeline_parallel_size": 2}, {}),
    "three, steps overlapped": ({"pipeline_parallel_size": 3, "async_scheduling": True}, {}),
    "two of two shares": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {"tp_invariant": True}),
    "int8, cut as asked": ({"pipeline_parallel_size": 2, "pipeline_partition": "1,2"}, {"quantization": "int8"}),
    "drafts": ({"pipeline_parallel_size": 2}, {"speculative_config": {"method": "ngram"}}),
}  # fmt: skip
"""How many stages, and what one process has as well."""


@pytest.mark.parametrize("case", quick(CASES, ("three, steps overlapped", "two of two shares", "drafts")))
def test_stages_have_the_bits_of_one_process(
    case: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forks, grammars, logprobs of prompts, and chunks of requests that preempt others; cold, warm and woken."""
    monkeypatch.setattr("quire.executor.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.multiproc.Answers", lambda ranks: Future())
    stages, options = CASES[case]
    one = started(tiny_model("llama"), **options)
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("llama"), **stages, **options)
    for _ in range(2):
        for _ in range(2):
            outputs = run(engine)
            assert said(outputs) == said(alone)
            assert numbers(outputs) == numbers(alone)
        engine.sleep(1, "wait")
        engine.wake_up()
    engine.shutdown()


@pytest.mark.more
def test_stages_that_are_processes_until_one_is_killed(tiny_model: Callable[[str], Path]) -> None:
    one = started(tiny_model("llama"))
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("llama"), pipeline_parallel_size=2, async_scheduling=True)
    outputs = run(engine)
    assert said(outputs) == said(alone)
    assert numbers(outputs) == numbers(alone)
    pids = executor_of(engine)._ranks.pids
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    os.kill(pids[0], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 0 is lost; it says: process \d+: killed by signal 9"):
        run(engine)
    engine.shutdown()
    assert time.monotonic() - killed < 10
    assert all(map(is_gone, pids.values()))
