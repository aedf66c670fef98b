# SPDX-License-Identifier: Apache-2.0
"""Ranks that a real Ray places say what one process says, and leave nothing behind however they end.

`make test-more` installs Ray, which is too large for `make install`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, EngineError, ModelLoadError, StartupError
from quire.executor.ranks.ray_cluster import RayProcess
from quire.executor.ranks.ray_executor import RayStarter
from quire.executor.ranks.ray_ranks import actor_name
from tests.end_to_end.server import has_ended
from tests.executor.test_multiproc import PARAMS, executor_of, numbers, run, said, started
from tests.fixtures.ray_cluster import Cluster, below, ranks_below, wait_for, with_ray
from tests.fixtures.ray_cluster import cluster as cluster
from tests.fixtures.wide_llama import write_wide_llama

CASES: dict[str, dict[str, Any]] = {
    "shares": {"tensor_parallel_size": 2, "tp_invariant": True},
    "stages, int8": {"pipeline_parallel_size": 2, "quantization": "int8", "async_scheduling": True},
    "shares of stages": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "tp_invariant": True,
    },
    "shares of stages, int8": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "tp_invariant": True,
        "quantization": "int8",
    },
}
OF_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")


def ray(model: Path, **args: Any) -> LLMEngine:
    return started(model, **{"distributed_executor_backend": "ray"} | args)


def ray_of(engine: LLMEngine) -> RayProcess:
    """The process that knows Ray."""
    starter = executor_of(engine)._starter
    assert isinstance(starter, RayStarter)
    assert starter._process is not None
    return starter._process


@pytest.fixture(scope="module")
def wide(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tiny_model("llama"), tmp_path_factory.mktemp("wide"))


@pytest.mark.more
@with_ray
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_ray_have_the_bits_of_one_process(case: str, cluster: Cluster, wide: Path) -> None:
    options = CASES[case]
    one = started(wide, **{name: options[name] for name in options if name not in OF_RANKS})
    alone = run(one)
    one.shutdown()
    engine = ray(wide, **options)
    hosts = executor_of(engine)._starter._hosts  # type: ignore[attr-defined]
    assert len(set(hosts)) == len(hosts) // 2
    for _ in range(2):
        outputs = run(engine)
        assert said(outputs) == said(alone)
        assert numbers(outputs) == numbers(alone)
    engine.shutdown()
    wait_for(lambda: not cluster.ranks())


@pytest.mark.more
@with_ray
@pytest.mark.parametrize(
    "how",
    ["ray.kill", "kill -9 of the actor", "stop of the actor", "kill -9 of the rank", "stop of the rank"],
)
def test_a_rank_that_ends_is_named_and_all_end(
    how: str, cluster: Cluster, tiny_model: Callable[[str], Path]
) -> None:
    engine = ray(tiny_model("llama"), **CASES["shares of stages"])
    process = ray_of(engine)
    engine.add_request("last", [1, 2, 3], PARAMS[0])
    engine.step()
    rank, actor = cluster.ranks()[2]
    if how == "ray.kill":
        cluster.ask(f"ray.kill(ray.get_actor({actor_name(ray_of(engine).pid, 2)!r}))")
    else:
        os.kill(actor if "actor" in how else rank, signal.SIGSTOP if "stop" in how else signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"rank 2 is lost; it says: (its actor|killed by signal 9|process \d+ is stopped)"
    ):
        run_for_ever(engine)  # a rank whose actor is stopped computes for a while yet
    assert time.monotonic() - began < 10
    engine.shutdown()
    wait_for(lambda: not cluster.ranks())
    assert not Path(process.directory).exists()


def run_for_ever(engine: LLMEngine) -> NoReturn:
    while True:
        run(engine)


@pytest.mark.more
@with_ray
def test_insufficient_resources_are_reported_with_numbers(
    cluster: Cluster, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.ranks.ray_cluster.PLACE_S", 0.5)
    words = (
        r"no room for 2 ranks of 3 CPUs each within 0.5 s: its hosts have 2 \+ 2 CPUs, of which 4 are free"
    )
    with pytest.raises(StartupError, match=words):
        ray(tiny_model("llama"), tensor_parallel_size=2, cpu_threads=3)
    assert int(float(cluster.ask("print(ray.available_resources()['CPU'])"))) == 4


@pytest.mark.more
@with_ray
def test_ray_rank_load_failure_is_the_same_startup_error(
    cluster: Cluster, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("rwkv7"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        ray(tmp_path, tensor_parallel_size=2)
    wait_for(lambda: not cluster.ranks())


PROGRAM = """
import sys, time
from pathlib import Path
from tests.executor.test_ray import ray, ray_of
if __name__ == "__main__":
    engine = ray(Path(sys.argv[1]), tensor_parallel_size=2)
    print(ray_of(engine).pid, ray_of(engine).directory, flush=True)
    sys.stdin.readline()
    engine.shutdown()
"""


@pytest.mark.more
@with_ray
def test_nothing_outlives_a_ray_of_our_own_that_is_killed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = ray(tiny_model("llama"), tensor_parallel_size=2)
    pid = ray_of(engine).pid
    pids, ranks = below(pid), ranks_below(pid).values()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(has_ended(rank) for rank, _ in ranks))
    with pytest.raises(EngineError, match=r"rank . is lost; it says: Ray's process has ended"):
        run(engine)
    engine.shutdown()
    wait_for(lambda: all(map(has_ended, pids)))


@pytest.mark.more
@with_ray
@pytest.mark.parametrize("ends", ["orderly", "killed"])
def test_a_ray_of_our_own_is_guarded_and_goes_with_the_engine(
    ends: str, tiny_model: Callable[[str], Path]
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model("llama"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    pid, directory = process.stdout.readline().split()
    pids = [int(pid), *below(int(pid))]
    assert set(ranks_below(int(pid))) == {0, 1}
    assert Path(directory).stat().st_mode & 0o777 == 0o700
    (address,) = {
        word.split("=")[1] for pid in pids for word in words_of(pid) if word.startswith("--gcs-address=")
    }
    stranger = f"import ray; ray.init({address!r}, configure_logging=False)"
    refused = subprocess.run(
        [sys.executable, "-c", stranger], capture_output=True, text=True, env=environment
    )
    assert refused.returncode
    assert "token" in refused.stderr.lower()
    if ends == "killed":
        process.kill()
    process.communicate("\n")
    wait_for(lambda: all(map(has_ended, pids)), 20)
    assert not Path(directory).exists()


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_missing_ray_names_the_package_to_install(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "ray" else find(name, *of)
    )
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: .*pip install 'ray>="):
        ray(tiny_model("llama"))


@pytest.mark.more
@with_ray
@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "ray://127.0.0.1:10001",
            "RAY_ADDRESS is ray://127.0.0.1:10001; the engine joins a cluster by HOST:PORT",
        ),
        ("127.0.0.1:1", "Ray cannot be joined at RAY_ADDRESS=127.0.0.1:1: "),
    ],
)
def test_an_address_without_a_cluster_is_named(
    address: str, words: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartupError, match=words):
        ray(tiny_model("llama"))
