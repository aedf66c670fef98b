# SPDX-License-Identifier: Apache-2.0
"""Engines whose replicas share experts equal one process, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.messages import StepStarted
from quire.engine.replicas.lockstep import Lockstep
from quire.errors import ConflictError
from quire.executor.ranks.places import STAGE_S, RankGroups, with_replicas
from quire.kernels.cpu import library
from quire.scheduler.scheduler import Scheduler
from tests.engine.test_replica_processes import all_up, pid_of
from tests.engine.test_restart import run_all
from tests.engine.test_restart import started as serving
from tests.executor.test_multiproc import PARAMS, numbers, run, said, started
from tests.fixtures.thread_ranks import InProcess, ThreadRanks
from tests.fixtures.thread_replicas import ThreadReplica

SHARED: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}
TWICE: dict[str, Any] = {"tensor_parallel_size": 2}
INVARIANT: dict[str, Any] = {"enable_expert_parallel": True, "tp_invariant": True}

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


@pytest.mark.parametrize("seed", range(5))
def test_replicas_reach_the_same_step_for_any_work_and_delay(seed: int) -> None:
    """No replica of three starts a step before all have started the one before."""
    chance = random.Random(seed)
    words: list[list[deque[StepStarted]]] = [[deque() for _ in range(3)] for _ in range(3)]
    work = [chance.randrange(9) for _ in range(3)]
    replicas = [
        Lockstep(lambda word, own=own: [words[own][other].append(word) for other in range(3) if other != own])
        for own in range(3)
    ]
    taken = [0, 0, 0]
    while any(work) or any(one.is_behind for one in replicas) or any(map(any, words)):
        own = chance.randrange(3)
        source = chance.randrange(3)
        if words[source][own] and chance.random() < 0.5:
            replicas[own].receive(words[source][own].popleft())
        elif (work[own] or replicas[own].is_behind) and replicas[own].started == min(
            one.started for one in replicas
        ):
            work[own] -= bool(work[own])
            replicas[own].begin()
            taken[own] += 1
    assert len(set(taken)) == 1
    assert not any(one.is_behind for one in replicas)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        pytest.param("qwen3moe", {}, {"quantization": "int8"}, marks=pytest.mark.more),
        pytest.param("mixtral", {"async_scheduling": True}, {"quantization": "int4"}, marks=pytest.mark.more),
        pytest.param("deepseekv3", TWICE, INVARIANT, marks=pytest.mark.more),
        (
            "gptoss",
            TWICE | {"async_scheduling": True, "num_gpu_blocks_override": 8},
            INVARIANT | {"dtype": "bfloat16"},
        ),
    ],
)
def test_replicas_have_the_bits_of_one_process(
    name: str,
    replicas: dict[str, Any],
    options: dict[str, Any],
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs are equal for forks, grammars, prompt logprobs and preempted chunks, with a cold and a warm cache."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    monkeypatch.setattr("quire.engine.sync_engine.make_clients", ThreadReplica.all_of)
    one = started(tiny_model(name), **options)
    alone = run(one)
    one.shutdown()
    limits = {"routing_policy": "round_robin", "num_gpu_blocks_override": 6}
    engine = started(tiny_model(name), **limits | SHARED | options | replicas)
    for _ in range(2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(ConflictError, match="share experts"):
        engine.sleep(1, "wait")
    engine.shutdown()
    clients = [client for client in engine._clients if isinstance(client, ThreadReplica)]
    assert sum(client.steps_taken_for_others for client in clients) > 8
    assert sum(client.num_preemptions for client in clients)


def test_ranks_of_replicas_are_awaited_for_the_core_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose core hangs answers nobody, though it runs itself."""
    waits: list[float] = []

    def meet(*args: Any, answer_s: float, **options: Any) -> InProcess:
        waits.append(answer_s)
        return InProcess.group(2)[0]

    monkeypatch.setattr("quire.distributed.gloo.Gloo", meet)
    monkeypatch.setattr("quire.executor.ranks.places.share_memory", meet)
    for timeout_s, longest_s in ((3.0, 60.0), (0.0, STAGE_S)):
        config = EngineConfig.from_args(model="any", core_heartbeat_timeout=timeout_s, **SHARED)
        with_replicas(RankGroups(), 0, config)
        assert waits[-2:] == [longest_s] * 2


@needs_kernels
@pytest.mark.more
async def test_killed_replica_ends_the_others_and_all_restart(
    tiny_model: Callable[[str], Path],
) -> None:
    """Requests go on, with the tokens that they would have had, whatever is killed or stopped, a core or a rank."""
    args: dict[str, Any] = {
        "max_num_seqs": 4,
        "core_heartbeat_timeout": 3.0,
        "enable_prefix_caching": False,
        "cpu_threads": 1,
    }
    args |= {"max_model_len": 128, "num_gpu_blocks_override": 40, "device": "cpu"}
    alone = await serving(tiny_model("qwen3moe"), Scheduler, distributed_executor_backend="uni", **args)
    wanted = await run_all(alone, None, lambda: None)
    await alone.shutdown()
    args |= SHARED | {"distributed_executor_backend": "mp", "routing_policy": "round_robin"}
    engine = await serving(tiny_model("qwen3moe"), Scheduler, **args)
    try:
        for replica, victim, struck in (
            (0, pid_of, signal.SIGKILL),
            (1, rank_of, signal.SIGKILL),
            (1, pid_of, signal.SIGSTOP),
        ):
            pids = [pid_of(engine, core) for core in range(2)]
            assert await run_all(engine, None, partial(os.kill, victim(engine, replica), struck)) == wanted
            await all_up(engine)
            assert not {pid_of(engine, core) for core in range(2)} & {*pids}
        assert await run_all(engine, None, lambda: None) == wanted
    finally:
        await engine.shutdown()


def rank_of(engine: AsyncLLM, core: int) -> int:
    """The process of its rank."""
    lists = [path.read_text() for path in Path(f"/proc/{pid_of(engine, core)}/task").glob("*/children")]
    (rank,) = (int(child) for children in lists for child in children.split())
    return rank
