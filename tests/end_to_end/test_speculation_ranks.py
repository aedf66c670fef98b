# SPDX-License-Identifier: Apache-2.0
"""Speculation on ranks that share each layer, or have some each: they guess alike whatever their clocks say, and say
what one says.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire import LoRARequest, SamplingParams
from quire.spec_decode.step_costs import OwnClock
from quire.worker.cpu import HostMark
from tests.end_to_end.test_draft_heads import MODEL, guessing
from tests.end_to_end.test_draft_heads import proposed as proposed  # a fixture
from tests.end_to_end.test_overlapped import STEM, Job, serve
from tests.fixtures.draft_heads import HEADS, write_mtp
from tests.fixtures.quick import quick
from tests.fixtures.thread_ranks import ThreadRanks
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

CASES: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "medusa": {"method": "medusa"},
    "mtp": {"method": "mtp"},
    "draft_model": {"method": "draft_model", "quantization": "int8"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
}


@pytest.fixture
def ranks_with_clocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every duration is another, so ranks that went by theirs would soon differ in what they do."""
    draw = random.Random(6)
    passed = itertools.accumulate(0.01 * draw.random() for _ in itertools.repeat(None))
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    monkeypatch.setattr("tests.fixtures.thread_ranks.TIMEOUT_S", 20.0)
    monkeypatch.setattr(HostMark, "seconds_since", lambda self, earlier: 1.0 + draw.random())
    monkeypatch.setattr(OwnClock, "now", lambda self: next(passed))


def jobs(adapter: LoRARequest | None = None) -> list[Job]:
    draw = random.Random(9)
    shapes: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "logprobs": 1})
    return [
        Job(
            STEM[: draw.randrange(30)] + [draw.randrange(3, 90) for _ in range(3)] * 2,
            SamplingParams(**shapes[number % 2], seed=number, max_tokens=24, ignore_eos=True),
            adapter=adapter if number % 3 == 0 else None,
        )
        for number in range(8)
    ]


def guessed(case: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and what is to guess for it."""
    family = "qwen3.5moe" if case == "mtp" else MODEL
    model = tiny_model(family)
    if case == "mtp":
        model = write_mtp(family, model, tmp_path / "model")
        heads = model
    else:
        heads = HEADS[case].write(tmp_path / "heads") if case in HEADS else model
    keys: dict[str, Any] = guessing(heads, **CASES[case], adaptive=True)
    if case in ("mtp", "ngram"):
        del keys["speculative_config"]["model"]
    return model, keys


@pytest.mark.parametrize("case", quick(CASES, ["eagle", "mtp"]))
@pytest.mark.parametrize("loop", quick(["plain", "overlapped"], ["plain"]))
@pytest.mark.usefixtures("ranks_with_clocks_of_their_own")
def test_two_ranks_match_one_rank(
    case: str, loop: str, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    model, keys = guessed(case, tiny_model, tmp_path)
    args = {"model": str(model), "max_model_len": 96, "max_num_seqs": 4, "tp_invariant": case != "mtp"}
    args |= {"async_scheduling": loop == "overlapped", "max_num_batched_tokens": 24}
    expected, _ = serve(jobs(), **args)
    got, stats = serve(jobs(), **args, **keys, tensor_parallel_size=2)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("case", quick(CASES, ["eagle3", "draft_model"]))
@pytest.mark.parametrize("loop", quick(["plain", "overlapped"], ["overlapped"]))
@pytest.mark.usefixtures("ranks_with_clocks_of_their_own")
def test_two_stages_sample_and_draft_as_one(
    case: str,
    loop: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    proposed: list[tuple[list[int], list[int]]],
    restore_threads: None,
) -> None:
    """The drafter reads the same numbers in two pipeline stages as in one process."""
    model, keys = guessed(case, tiny_model, tmp_path)
    keys["speculative_config"]["adaptive"] = False
    args = {"model": str(model), "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    expected, _ = serve(jobs(), **args)
    alone, _ = serve(jobs(), **args, **keys)
    guesses = {tuple(ids): found for ids, found in proposed}
    proposed.clear()
    got, stats = serve(
        jobs(), **args, **keys, pipeline_parallel_size=2, async_scheduling=loop == "overlapped"
    )
    assert [one.outputs for one in alone] == [one.outputs for one in expected]
    assert [one.outputs for one in got] == [one.outputs for one in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 0
    pairs = [(guesses.get(tuple(ids), []), found) for ids, found in proposed]
    common = [min(len(one), len(other)) for one, other in pairs]
    assert sum(common) > 100 or case == "ngram", "which is no model"
    for count, (one, other) in zip(common, pairs, strict=True):
        assert one[:count] == other[:count]


@pytest.mark.usefixtures("ranks_with_clocks_of_their_own")
def test_two_ranks_draft_for_adapters(
    tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    model = tiny_model(MODEL)
    layers = {name: shape for name, shape in linear_shapes(oracle_of(model)).items() if "layers" in name}
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", layers)))
    heads = HEADS["eagle"].write(tmp_path / "heads")
    args = {"model": str(model), "max_model_len": 96, "max_num_seqs": 4, "enable_lora": True}
    expected, _ = serve(jobs(adapter), **args)
    got, stats = serve(
        jobs(adapter), **args, **guessing(heads, "eagle", adaptive=True), tensor_parallel_size=2
    )
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 0
