# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own do what a worker in the core's process does, and none outlives its executor."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.errors import (
    ConfigError,
    EngineError,
    ModelLoadError,
    RankLostError,
    StartupError,
    ValidationError,
)
from quire.executor.ranks.handles import CallFailed
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.rank_processes import HostStarter
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams

PROMPTS = [[3, 1, 4, 1, 5] * 5, [2, 7, 1, 8], [99] * 30, [50, 60, 70]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=9, seed=3, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(max_tokens=12, seed=4, ignore_eos=True, n=2),
    SamplingParams(max_tokens=8, seed=5, structured_outputs=StructuredOutputsParams(regex="[ab]{5}")),
]


def started(model: Path, **args: Any) -> LLMEngine:
    limits = {
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 12,
        "cpu_threads": 1,
    }
    return LLMEngine(EngineConfig.from_args(model=str(model), device="cpu", **limits | args))


def run(engine: LLMEngine, wanted: Sequence[SamplingParams] = PARAMS) -> dict[str, RequestOutput]:
    """Run the first requests, which do not all fit into the cache at once, and return their outputs."""
    for index, (prompt, params) in enumerate(zip(PROMPTS, wanted, strict=False)):
        engine.add_request(str(index), list(prompt), params)
    ended = {}
    while engine.has_unfinished_requests():
        ended.update({output.request_id: output for output in engine.step() if output.finished})
    return ended


def said(outputs: dict[str, RequestOutput]) -> Any:
    return {
        name: [(list(one.token_ids), one.finish_reason) for one in output.outputs]
        for name, output in sorted(outputs.items())
    }


def numbers(outputs: dict[str, RequestOutput]) -> Any:
    return {
        name: (output.prompt_logprobs, [one.logprobs for one in output.outputs])
        for name, output in sorted(outputs.items())
    }


def executor_of(engine: LLMEngine) -> MultiprocExecutor:
    executor = engine._clients[0]._core.executor  # type: ignore[attr-defined]
    assert isinstance(executor, MultiprocExecutor)
    return executor


def pids_of(engine: LLMEngine) -> dict[int, int]:
    starter = executor_of(engine)._starter
    assert isinstance(starter, HostStarter)
    return starter.pids


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, RequestOutput]]:
    engine = started(tiny_model("llama"))
    yield run(engine)
    engine.shutdown()


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Return a function that lists the directories left by ranks in this test's own temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: set(tmp_path.glob("quire-ranks-*"))


@pytest.mark.more
def test_one_rank_has_the_bits_of_a_worker_in_the_core(
    alone: dict[str, RequestOutput], tiny_model: Callable[[str], Path]
) -> None:
    engine = started(tiny_model("llama"), distributed_executor_backend="mp", async_scheduling=True)
    for level in (1, 2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
        engine.sleep(level, "wait")
        engine.wake_up()
    assert said(run(engine)) == said(alone)
    executor = executor_of(engine)
    executor._ranks._wires[0].close()  # as when the core is killed
    executor._starter.processes._processes[0].wait(60)
    engine.shutdown()


def test_two_ranks_have_the_bits_of_one_until_one_is_killed(
    tiny_model: Callable[[str], Path], directories: Callable[[], set[Path]]
) -> None:
    """All replay recorded graphs; in those of two, kernels cross ranks."""
    one = started(tiny_model("llama"), tp_invariant=True)
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("llama"), tp_invariant=True, tensor_parallel_size=2)
    assert not directories(), "ranks that have met need none"
    for _ in range(2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
        engine.sleep(1, "wait")
        engine.wake_up()
    pids = pids_of(engine)
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 1 is lost; it says: process \d+: killed by signal 9"):
        run(engine)
    engine.shutdown()
    assert all(map(is_gone, pids.values()))


@pytest.mark.more
def test_two_ranks_that_share_experts_have_the_bits_of_one(
    tiny_model: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """In recorded graphs as well: what crosses them are kernels."""
    options = {"tp_invariant": True, "enable_expert_parallel": True}
    one = started(tiny_model("deepseekv3"), **options)
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model("deepseekv3"), tensor_parallel_size=2, **options)
    for _ in range(2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
        engine.sleep(1, "wait")
        engine.wake_up()
    engine.shutdown()
    assert "not recorded" not in capfd.readouterr().err


@pytest.mark.more
@pytest.mark.parametrize("name", ["olmo2", "mamba2", "opt"])
def test_ranks_of_families_have_the_bits_of_one_process(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Norms of rows that ranks share, and a config with an infinite number, among processes that replay
    recorded graphs."""
    one = started(tiny_model(name), tp_invariant=True)
    alone = run(one)
    one.shutdown()
    engine = started(tiny_model(name), tp_invariant=True, tensor_parallel_size=2)
    outputs = run(engine)
    engine.shutdown()
    assert said(outputs) == said(alone)
    assert numbers(outputs) == numbers(alone)


def test_rank_load_failure_is_the_same_startup_error(
    tiny_model: Callable[[str], Path], directories: Callable[[], set[Path]], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("rwkv7"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        started(tmp_path, tensor_parallel_size=2)
    assert not directories()


@pytest.mark.parametrize("error", [StartupError("no"), ConfigError("no"), ValidationError("no")])
def test_client_errors_keep_their_class(error: Exception) -> None:
    found = CallFailed.from_error(error).error(1)
    assert (type(found), str(found)) == (type(error), "no")


@pytest.mark.parametrize("error", [ValueError("no"), RankLostError([3], "no"), KeyboardInterrupt("no")])
def test_an_error_of_ours_has_the_name_of_the_rank(error: BaseException) -> None:
    found = CallFailed.from_error(error, 7).error(1)
    assert type(found) is EngineError
    assert str(found) == f"rank 1 failed: {type(error).__name__}: {error}"
