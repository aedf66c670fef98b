# SPDX-License-Identifier: Apache-2.0
"""Division of a host's cores and memory among replicas, on made-up topologies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.config.cache import KVEventsConfig
from quire.engine.replicas.configs import check_replicas, replica_configs
from quire.errors import ConfigError
from quire.platforms import Host, NumaNode, divide_cores, format_processors, nodes_of
from tests.fixtures.folded import folded

GIB = 2**30


def nodes(*sizes: int) -> list[NumaNode]:
    """So many cores on each, of two processors as the kernel numbers them."""
    total, made, first = sum(sizes), list[NumaNode](), 0
    for number, size in enumerate(sizes):
        made.append(NumaNode(number, [(core, core + total) for core in range(first, first + size)]))
        first += size
    return made


def made_host(directory: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], **files: str) -> Host:
    """A machine with nodes of so many cores, two processors each, and 16 GiB of memory."""
    total = sum(sizes)
    contents = {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n", **files}
    for node in nodes(*sizes):
        listed = format_processors([cpu for core in node.cores for cpu in core])
        contents[f"sys/devices/system/node/node{node.number}/cpulist"] = listed + "\n"
        for core, cpus in enumerate(node.cores):
            for cpu in cpus:
                folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
                contents |= {
                    f"{folder}/core_id": str(core),
                    f"{folder}/physical_package_id": str(node.number),
                }
    for name, text in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2 * total)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Host(directory)


def config(**args: Any) -> EngineConfig:
    return EngineConfig.from_args(**{"device": "cpu", "distributed_executor_backend": "uni", **args})


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_no_core_is_given_to_two_and_none_is_left(sizes: list[int], num_replicas: int) -> None:
    parts = divide_cores(nodes(*sizes), num_replicas)
    assert len(parts) == num_replicas
    assert [core for part in parts for core in part] == [
        core for node in nodes(*sizes) for core in node.cores
    ]
    if len(set(sizes)) == 1 and num_replicas <= sum(sizes):
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1


@folded(
    ("sizes", "num_replicas", "placed"),
    [
        ((4, 4), 2, [[0], [1]]),
        ((4, 4), 4, [[0], [0], [1], [1]]),
        ((4, 2), 2, [[0], [1]]),
        ((4, 4, 4, 4), 2, [[0, 1], [2, 3]]),
        ((4, 4), 3, [[0], [0, 1], [1]]),
        ((6, 1), 4, [[0], [0], [0], [0, 1]]),
        ((8,), 3, [[0], [0], [0]]),
    ],
)
def test_replicas_keep_to_nodes_where_they_can(
    sizes: tuple[int, ...], num_replicas: int, placed: list[list[int]]
) -> None:
    made = nodes(*sizes)
    assert [nodes_of(part, made) for part in divide_cores(made, num_replicas)] == placed


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_they_are_written(processors: set[int]) -> None:
    from quire.platforms import _numbers

    assert set(_numbers(format_processors(list(processors)))) == processors


def test_replica_has_its_own_processors_threads_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_host(tmp_path, monkeypatch, (4, 4))
    assert host.nodes() == nodes(4, 4)
    first, second = replica_configs(config(data_parallel_size=2), in_process=False, host=host)
    assert first.share is not None
    assert second.share is not None
    assert first.share.processors == (0, 1, 2, 3, 8, 9, 10, 11)
    assert second.share.processors == (4, 5, 6, 7, 12, 13, 14, 15)
    assert first.share.memory_bytes == second.share.memory_bytes == 4 * GIB
    assert (first.device.cpu_threads, second.device.cpu_threads) == (4, 4)
    assert (first.share.index, second.share.index) == (0, 1)
    assert (first.parallel.first_replica, second.parallel.first_replica) == (0, 1)
    assert first.parallel.num_replicas == 1


def test_threads_follow_quota_ranks_and_user_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_host(tmp_path, monkeypatch, (8,), **{"sys/fs/cgroup/cpu.max": "400000 100000"})

    def threads(**args: Any) -> list[int]:
        made = replica_configs(config(data_parallel_size=2, **args), in_process=False, host=host)
        return [one.device.cpu_threads for one in made]

    assert threads() == [2, 2]
    assert threads(tensor_parallel_size=2) == [1, 1]
    assert threads(tensor_parallel_size=4) == [1, 1]
    assert threads(cpu_threads=7) == [7, 7]
    assert threads(cpu_numa="off") == [2, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == [0, 0]


def test_replicas_without_binding_have_no_own_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_host(tmp_path, monkeypatch, (2, 2))
    made = replica_configs(config(data_parallel_size=2, cpu_numa="off"), in_process=False, host=host)
    assert [one.share and one.share.processors for one in made] == [(), ()]


def test_single_core_is_unchanged_and_in_process_cores_share() -> None:
    assert replica_configs(one := config(), in_process=False) == [one]
    two = replica_configs(config(data_parallel_size=2), in_process=True)
    assert [one.share for one in two] == [None, None]
    assert [one.parallel.first_replica for one in two] == [0, 1]


def test_a_part_of_the_replicas_is_numbered_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_host(tmp_path, monkeypatch, (4,))
    part = config(
        data_parallel_size=4,
        data_parallel_size_local=2,
        data_parallel_start_rank=2,
        data_parallel_hybrid_lb=True,
    )
    check_replicas(part, host)
    made = replica_configs(part, in_process=False, host=host)
    assert [one.parallel.first_replica for one in made] == [2, 3]
    alone = config(data_parallel_size=4, data_parallel_rank=3, data_parallel_external_lb=True)
    check_replicas(alone, host)
    assert replica_configs(alone, in_process=False) == [alone]
    assert (alone.parallel.num_replicas, alone.parallel.first_replica) == (1, 3)


SIZE = "--data-parallel-size is"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"data_parallel_size": 5}, f"{SIZE} 5, and there are cores for 4 replicas"),
        (
            {"data_parallel_size": 2, "device": "xpu"},
            f"{SIZE} 2, which requires --device cpu or cuda, not xpu",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_backend": "ray", "device": "cuda"},
            "--data-parallel-backend ray requires --device cpu, not cuda",
        ),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, f"replicas 0 to 2 .*{SIZE} 2"),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 2}, f"replicas 2 to 5 .*{SIZE} 4"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 2},
            "rank is 2, and --data-parallel-size 2 counts from 0",
        ),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, "requires --data-parallel-rank"),
        (
            {"data_parallel_size": 2, "cpu_pin_threads": True, "cpu_numa": "off"},
            "--cpu-pin-threads would pin all replicas",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_hybrid_lb": True},
            "which --data-parallel-hybrid-lb contradicts",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_start_rank": 1},
            "which --data-parallel-start-rank contradicts",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_size_local": 2},
            "which --data-parallel-size-local contradicts",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_impossible_replica_options_are_refused_with_advice(
    args: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_host(tmp_path, monkeypatch, (2, 2))
    with pytest.raises(ConfigError, match=words):
        check_replicas(config(**args), host)


@pytest.mark.parametrize(
    "args", [{"data_parallel_size": 0}, {"data_parallel_rpc_port": 0}, {"data_parallel_rpc_port": 65536}]
)
def test_numbers_out_of_range_name_their_option(args: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-"):
        config(**args)


def events(endpoint: str, replay: str) -> KVEventsConfig:
    settings = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    return KVEventsConfig(settings)


def test_kv_events_of_each_replica_have_addresses_of_their_own() -> None:
    settings = events("tcp://127.0.0.1:5557", "ipc:///tmp/x").settings
    assert settings.of_replica(0) == settings
    third = settings.of_replica(3)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://127.0.0.1:5560", "ipc:///tmp/x_dp3")
    assert KVEventsConfig().settings.of_replica(1).replay_endpoint is None


def test_addresses_that_two_replicas_would_have_are_refused() -> None:
    near = events("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    near.check(enable_prefix_caching=True, replicas=range(4, 5))
    with pytest.raises(ConfigError, match="each of 2 replicas adds its number to the ports"):
        near.check(enable_prefix_caching=True, replicas=range(2))
    far = events("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559")
    far.check(enable_prefix_caching=True, replicas=range(2))
