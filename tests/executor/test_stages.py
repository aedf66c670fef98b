# SPDX-License-Identifier: Apache-2.0
"""Engines of several pipeline stages equal one process, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError, EngineError
from quire.kv_cache.spec import KVCacheConfig
from quire.layers.shard import Shard
from tests.executor.test_multiproc import PARAMS, is_gone, numbers, pids_of, run, said, started
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.thread_ranks import ThreadRanks
from tests.models.harness import prepared_config
from tests.models.test_stages import EVERY_FAMILY, MOST_STAGES

UNCONSTRAINED = PARAMS[:3]

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
    """Outputs are equal for forks, grammars, prompt logprobs and preempted chunks; cold, warm and after a sleep."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
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


SIZES_SAID = re.compile(r"stage \d of \d: .* \(--pipeline-partition (\S+)\)")
SIX_LAYERS: dict[str, Any] = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 6}}


class Clocks:
    """In the place of `time_layers`: by the clock of each share one layer takes as long as ten others."""

    def __init__(self, costly: Sequence[int]) -> None:
        self._costly = costly
        self.asked: set[int] = set()

    def __call__(
        self, config: EngineConfig, shard: Shard, cache: KVCacheConfig, own: range, num_layers: int
    ) -> float:
        self.asked.add(threading.get_ident())
        return 10.0 if self._costly[shard.rank] in own else 1.0


@pytest.mark.parametrize("shares", [1, 2])
def test_all_ranks_have_the_cut_that_the_first_one_measures(
    shares: int,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the other share measures; those of the later stage do not even try."""
    caplog.set_level("INFO", "quire.worker.stage_sizes")
    clocks = Clocks([0, 5])
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.worker.stage_sizes.time_layers", clocks)
    monkeypatch.setattr("quire.worker.stage_sizes.kinds_of", lambda layers: [[n] for n in range(len(layers))])
    one = started(tiny_model("llama"), **SIX_LAYERS)
    alone = said(run(one, UNCONSTRAINED))
    one.shutdown()
    engine = started(tiny_model("llama"), pipeline_parallel_size=2, tensor_parallel_size=shares, **SIX_LAYERS)
    assert said(run(engine, UNCONSTRAINED)) == alone
    engine.shutdown()
    assert len(clocks.asked) == shares
    found = [match[1] for match in map(SIZES_SAID.fullmatch, caplog.messages) if match]
    assert found == ["1,5"] * (2 * shares)


def test_stages_are_cut_by_bytes_where_measuring_fails(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.worker.stage_sizes.time_layers", fail)
    engine = started(tiny_model("llama"), pipeline_parallel_size=2, **SIX_LAYERS)
    engine.shutdown()
    assert "from the bytes that a step reads: timing failed: RuntimeError: no memory" in caplog.text


def test_unsplittable_model_is_reported_while_later_stages_wait(
    tiny_model: Callable[[str], Path],
) -> None:
    """Only the first stage has looked at the model by then."""
    with pytest.raises(ConfigError, match="inputs cannot be split over 2 ranks in multiples of 64"):
        started(tiny_model("llama"), pipeline_parallel_size=2, tensor_parallel_size=2, quantization="int8")


@pytest.mark.parametrize("option", [{"pipeline_partition": "2,4"}, {}])
def test_given_or_absent_split_measures_nothing(
    option: dict[str, Any], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks([0])
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.worker.stage_sizes.time_layers", clocks)
    stages = 2 if option else 1
    started(tiny_model("llama"), pipeline_parallel_size=stages, **option, **SIX_LAYERS).shutdown()
    assert not clocks.asked


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), ()))
def test_stages_of_every_family_have_the_bits_of_one_process(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second time prefixes are found, and with them states of layers that keep one."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    limits: dict[str, Any] = {"max_num_batched_tokens": 12, "num_gpu_blocks_override": 60, "block_size": 4}
    num_layers = prepared_config(tiny_model(name)).arch.num_layers
    found = []
    for num_stages in range(1, min(MOST_STAGES.get(name, 3), num_layers) + 1):
        engine = started(tiny_model(name), pipeline_parallel_size=num_stages, **limits)
        for _ in range(2):
            outputs = run(engine, UNCONSTRAINED)
            found.append((said(outputs), numbers(outputs)))
        engine.shutdown()
    assert all(one == found[0] for one in found)


@pytest.mark.more
@pytest.mark.parametrize("shares", [2, 4])
def test_ranks_of_stages_may_share_experts(
    shares: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly or not."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    options = {"tp_invariant": True, "enable_expert_parallel": True}
    one = started(tiny_model("mixtral"), **options)
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("mixtral"), pipeline_parallel_size=2, tensor_parallel_size=shares, **options)
    outputs = run(engine)
    engine.shutdown()
    assert said(outputs) == said(alone)
    assert numbers(outputs) == numbers(alone)


@pytest.mark.more
@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (0, signal.SIGKILL, "killed by signal 9"),
        (1, signal.SIGSTOP, "is stopped"),
        (2, signal.SIGSTOP, "is stopped"),
        (3, signal.SIGKILL, "killed by signal 9"),
    ],
)
def test_whichever_rank_ends_or_stops_is_named_within_seconds(
    rank: int, how: signal.Signals, words: str, tiny_model: Callable[[str], Path]
) -> None:
    engine = started(
        tiny_model("llama"), pipeline_parallel_size=2, tensor_parallel_size=2, async_scheduling=True
    )
    pids = pids_of(engine)
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    os.kill(pids[rank], how)
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank {rank} is lost; it says: process {pids[rank]}:? {words}"):
        run(engine)
    assert time.monotonic() - began < 10
    engine.shutdown()
    assert all(map(is_gone, pids.values()))


@pytest.mark.more
def test_stages_that_are_processes_until_one_is_killed(tiny_model: Callable[[str], Path]) -> None:
    one = started(tiny_model("llama"))
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("llama"), pipeline_parallel_size=2, async_scheduling=True)
    outputs = run(engine)
    assert said(outputs) == said(alone)
    assert numbers(outputs) == numbers(alone)
    pids = pids_of(engine)
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    os.kill(pids[0], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 0 is lost; it says: process \d+: killed by signal 9"):
        run(engine)
    engine.shutdown()
    assert time.monotonic() - killed < 10
    assert all(map(is_gone, pids.values()))
