# SPDX-License-Identifier: Apache-2.0
"""Ranks on asynchronous devices: what crosses them is part of graphs, and they say what one process does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")
from triton.runtime.interpreter import GridExecutor

from quire.config import EngineConfig
from quire.errors import RankLostError
from quire.executor.rank_placement import memory_per_rank, num_ranks_sharing_memory
from quire.kernels.cpu import library
from quire.kv_cache.spec import KVMemory
from quire.layers.shard import Shard
from quire.models.stages import Stage
from quire.processes import ENDED
from quire.sampling_params import SamplingParams
from quire.worker.model_runner import LaunchedStep
from quire.worker.worker import Worker
from tests.distributed.test_group import on_all
from tests.executor.test_multiproc import run, said, started
from tests.fixtures import thread_ranks
from tests.fixtures.device_ways import device_ranks
from tests.fixtures.thread_ranks import ThreadRanks
from tests.worker.fake_gpu import FakeGpu
from tests.worker.harness import tiny_config

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())

PARAMS = [
    SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=3, top_k=5, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, presence_penalty=0.5, ignore_eos=True, logprobs=2),
]


def one_at_a_time(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels in Triton's interpreter, which keeps what it is doing in one place for all threads."""
    lock = threading.Lock()

    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(*args, **kwargs)

    return locked


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpu]:
    """Those of ranks that an engine starts, which are threads, in no order."""
    devices: list[FakeGpu] = []

    def make_device(name: str) -> FakeGpu:
        devices.append(FakeGpu())
        return devices[-1]

    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    monkeypatch.setattr(thread_ranks, "make_device", make_device)
    monkeypatch.setattr(thread_ranks, "InProcess", SimpleNamespace(group=device_ranks))
    monkeypatch.setattr(GridExecutor, "__call__", one_at_a_time(GridExecutor.__call__))
    return devices


GRAPHS: dict[str, Any] = {"prefill_graph_sizes": [0], "cuda_graph_capture": "lazy"}


@needs_kernels
def test_device_ranks_replay_graphs_and_match_one_process(
    tiny_model: Callable[[str], Path], devices: list[FakeGpu]
) -> None:
    options: dict[str, Any] = {"tp_invariant": True, **GRAPHS}
    one = started(tiny_model("llama"), **options)
    expected = said(run(one, PARAMS))
    one.shutdown()
    engine = started(tiny_model("llama"), tensor_parallel_size=2, cudagraph_capture_sizes=[3], **options)
    assert said(run(engine, PARAMS)) == expected
    engine.shutdown()
    first, second = devices
    assert first.captured == second.captured
    assert first.replayed == second.replayed
    assert 3 in first.replayed
    assert first.replayed_choices  # behind penalties; the likeliest tokens are exchanged


@needs_kernels
@pytest.mark.parametrize(
    ("num_shares", "more"),
    [
        (1, {}),
        pytest.param(2, {"tp_invariant": True}, marks=pytest.mark.more),
        pytest.param(1, {"speculative_config": {"method": "ngram"}}, marks=pytest.mark.more),
        pytest.param(1, {"enforce_eager": True}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_device_stages_replay_graphs_and_match_one_process(
    num_shares: int, more: dict[str, Any], tiny_model: Callable[[str], Path], devices: list[FakeGpu]
) -> None:
    """Each has graphs of its layers, which read the stream of the stage before where it arrives."""
    options: dict[str, Any] = {**GRAPHS, **more}
    one = started(tiny_model("llama"), **options)
    expected = said(run(one, PARAMS))
    one.shutdown()
    shape = {"pipeline_parallel_size": 2, "tensor_parallel_size": num_shares}
    engine = started(tiny_model("llama"), cudagraph_capture_sizes=[3], **shape, **options)
    assert said(run(engine, PARAMS)) == expected
    engine.shutdown()
    assert len(devices) == 2 * num_shares
    if "enforce_eager" in more:
        return
    assert all(3 in device.replayed for device in devices)
    assert sum(bool(device.replayed_choices) for device in devices) == num_shares  # the last stage chooses


@pytest.mark.parametrize("is_stage", [False, True])
def test_device_results_behind_a_lost_rank_are_dropped(is_stage: bool) -> None:
    """Be it that it can be read, or that it makes no sense; whether a share is lost or another stage."""

    def fail() -> Any:
        raise IndexError("token -7777777")

    silent: dict[int, str] = {}
    first, second = device_ranks(2, silent=silent)
    place = {"stage": Stage.of_group(first)} if is_stage else {"shard": Shard.of_group(first)}
    worker = Worker(tiny_config(dtype="float32"), FakeGpu(), **place)  # type: ignore[arg-type]
    fine, broken = (
        cast("LaunchedStep", SimpleNamespace(result=result)) for result in (lambda: "tokens", fail)
    )
    assert worker._result(fine) == "tokens"
    with pytest.raises(IndexError):
        worker._result(broken)
    silent[1] = ENDED
    first._watch._thread.join()
    for step in (fine, broken):
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            worker._result(step)
    on_all([first, second], lambda group: group.close())
    worker.shutdown()


@pytest.mark.parametrize(("device", "expected"), [("cpu", 50), ("cuda", 80)])
def test_devices_have_memory_of_their_own(device: str, expected: int) -> None:
    config = EngineConfig.from_args(device=device)
    found = [KVMemory(100, "free"), KVMemory(80, "free")]
    if device == "cpu":
        found = [KVMemory(100, "free")] * 2
    assert memory_per_rank(found, [num_ranks_sharing_memory(config, 2)] * 2).free_bytes == expected
