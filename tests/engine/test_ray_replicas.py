# SPDX-License-Identifier: Apache-2.0
"""Replicas that a real Ray brings: the same answers, whichever actor goes, and nothing is left of them.

`make test-more` installs Ray, which is too large for `make install`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores import OwnCores
from quire.engine.replicas.ray_process import replica_name
from quire.engine.replicas.ray_replicas import RayReplicas, with_threads
from quire.engine.startup import prepare
from quire.errors import ConfigError, StartupError
from quire.executor.ranks.ray_cluster import RayProcess
from tests.end_to_end.server import children_of, has_ended
from tests.engine.test_replica_processes import all_up, check_verbs, disturbing
from tests.engine.test_replicas import made_host
from tests.engine.test_restart import expected, run_all, started
from tests.fixtures.ray_cluster import Cluster, below, with_ray
from tests.fixtures.ray_cluster import cluster as cluster

BY_RAY: dict[str, Any] = {
    "data_parallel_backend": "ray",
    "data_parallel_size": 2,
    "cpu_threads": 1,
    "enable_prefix_caching": False,
}


def ray_of(engine: AsyncLLM) -> RayProcess:
    """The process that knows Ray."""
    cores = engine._cores
    assert isinstance(cores, OwnCores)
    assert isinstance(cores._ray, RayReplicas)
    return cores._ray._process


def cores_of(cluster: Cluster) -> dict[int, int]:
    """The actor of each core that runs below Ray's hosts."""
    pids = [pid for host in cluster.hosts for pid in below(host.pid)]
    return {core: actor for actor in pids for core in children_of(actor) if _is_core(core)}


def _is_core(pid: int) -> bool:
    try:
        return b"quire.engine.core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """The engine goes on meanwhile."""
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def refused(model: Path, cluster: Cluster, **args: Any) -> StartupError:
    """Start a server that must fail, and return its `StartupError` after Ray's processes have ended."""
    engine = AsyncLLM(config_of(model, **args))
    with pytest.raises(StartupError) as raised:
        await engine.wait_ready()
    await engine.shutdown()
    await until(lambda: not cores_of(cluster) and has_ended(ray_of(engine).pid))
    return raised.value


@pytest.mark.more
@with_ray
async def test_killed_actor_fails_no_request_and_is_replaced(cluster: Cluster, null_model_dir: Path) -> None:
    """Whoever kills it: the system, or Ray."""
    stop, results = await expected(null_model_dir, enable_prefix_caching=False)
    engine = await started(null_model_dir, **BY_RAY)
    ray = ray_of(engine)
    name = replica_name(ray.pid, 1)

    def kill() -> None:
        ((_, actor),) = cores_of(cluster).items()
        os.kill(actor, signal.SIGKILL)

    try:
        assert await run_all(engine, stop, disturbing(engine, kill)) == results
        assert engine.is_ready
        await all_up(engine)
        assert await run_all(engine, stop, disturbing(engine, lambda: None)) == results
        (before,) = cores_of(cluster)
        cluster.ask(f"ray.kill(ray.get_actor({name!r}))")
        await until(lambda: bool(cores_of(cluster).keys() - {before}))
        await all_up(engine)
        assert await run_all(engine, stop, disturbing(engine, lambda: None)) == results
        await check_verbs(engine)
    finally:
        await engine.shutdown()
    await until(lambda: not cores_of(cluster) and has_ended(ray.pid))
    # Whoever sees the process end may do so before the thread that ends it.
    await until(lambda: ray.directory not in map(str, private_directories._locks))


@pytest.mark.more
@with_ray
async def test_ray_replicas_match_one_and_have_their_own_host(
    cluster: Cluster, tiny_model: Callable[[str], Path]
) -> None:
    """The server's host has no CPU left for another."""
    args = {"distributed_executor_backend": "uni", "max_model_len": 128, "num_gpu_blocks_override": 200}
    model = tiny_model("llama")
    stop, results = await expected(model, enable_prefix_caching=False, **args)
    engine = await started(model, **BY_RAY | args | {"cpu_threads": 2})
    try:
        assert await run_all(engine, stop, lambda: None) == results
        assert len(cores_of(cluster)) == 1
    finally:
        await engine.shutdown()
    await until(lambda: not cores_of(cluster))


@pytest.mark.more
@with_ray
async def test_insufficient_resources_are_reported_with_numbers(
    cluster: Cluster, null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.ranks.ray_cluster.PLACE_S", 0.5)
    error = await refused(null_model_dir, cluster, data_parallel_size=6)
    words = (
        "no room for 5 replicas of 1 CPUs each within 0.5 s: its hosts have 2 + 2 CPUs, of which 4 are free"
    )
    assert words in str(error)


@pytest.mark.more
@with_ray
async def test_ray_replica_load_failure_is_the_same_startup_error(
    cluster: Cluster, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    args = {"distributed_executor_backend": "uni", "max_model_len": 128}
    assert re.match(r"replica [01]: .*model\.safetensors", str(await refused(tmp_path, cluster, **args)))


@pytest.mark.parametrize(
    ("args", "address", "words"),
    [
        ({}, "", "needs a cluster, and RAY_ADDRESS names none"),
        ({}, "local", "needs a cluster, and RAY_ADDRESS names none"),
        ({"distributed_executor_backend": "ray"}, "here:1", "places replicas and"),
        ({"data_parallel_size_local": 2}, "here:1", "leaves nothing to Ray"),
        ({"data_parallel_size": 1}, "here:1", "leaves nothing to Ray"),
        ({"data_parallel_rank": 1}, "here:1", "leaves nothing to Ray"),
    ],
)
def test_ray_needs_replicas_and_resources(
    args: dict[str, Any],
    address: str,
    words: str,
    null_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"--data-parallel-backend ray {words}"):
        prepare(config_of(null_model_dir, **args), "server")


def test_only_a_server_has_ray_bring_replicas(null_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    with pytest.raises(ConfigError, match=r"LLM\(\.\.\.\) has replicas of its own host only"):
        prepare(config_of(null_model_dir), "offline")
    by_hand = config_of(null_model_dir, data_parallel_start_rank=1)
    with pytest.raises(
        ConfigError, match="starts replicas on other hosts by itself; --headless does so by hand"
    ):
        prepare(by_hand, "headless")


def test_missing_ray_names_the_package_to_install(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "ray" else find(name, *of)
    )
    with pytest.raises(ConfigError, match=r"--data-parallel-backend ray needs Ray, .*pip install 'ray>="):
        prepare(config_of(null_model_dir), "server")


@pytest.mark.parametrize(
    ("args", "num_threads"),
    [({}, 6), ({"tensor_parallel_size": 4}, 1), ({"cpu_threads": 5, "tensor_parallel_size": 4}, 5)],
)
def test_ray_replica_has_the_threads_of_this_host_unless_given(
    args: dict[str, Any], num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_host(tmp_path, monkeypatch, [3, 3])
    config = EngineConfig.from_args(model="any", data_parallel_backend="ray", data_parallel_size=2, **args)
    assert with_threads(config, host).device.cpu_threads == num_threads


def config_of(model: Path, **args: Any) -> EngineConfig:
    fixed = {"distributed_executor_backend": "null", "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return EngineConfig.from_args(model=str(model), **fixed | BY_RAY | args)
