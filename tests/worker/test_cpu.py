# SPDX-License-Identifier: Apache-2.0
"""The CPU's facts, read from a made-up /proc and /sys."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.config.device import HostShare
from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.platforms import Host
from quire.worker import cpu as worker_cpu
from quire.worker.cpu import CpuDevice
from tests.fixtures.folded import folded
from tests.worker.harness import tiny_config

GIB = 2**30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable:   16777216 kB\nHugePages_Total:  0\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.item(52)
@folded(
    ("files", "gib"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, 16),
        ({"sys/fs/cgroup/memory.max": f"{8 * GIB}", "sys/fs/cgroup/memory.current": f"{3 * GIB}"}, 5),
        (
            {
                "sys/fs/cgroup/memory.max": f"{8 * GIB}",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            6,
        ),
        ({"proc/self/statm": f"9999999 9999999 {2 * GIB // mmap.PAGESIZE} 1 0 1 0"}, 14),
        ({"proc/self/statm": f"9999999 9999999 {20 * GIB // mmap.PAGESIZE} 1 0 1 0"}, 0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/a/memory.current": f"{1 * GIB}",
                "sys/fs/cgroup/a/b/memory.max": f"{9 * GIB}",
                "sys/fs/cgroup/a/b/memory.current": "0",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/x\n5:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{1 * GIB}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}",
            },
            1,
        ),
        ({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "20"}, 0),
    ],
    ids=[
        "host",
        "unlimited",
        "v2",
        "v2 with page cache",
        "mapped",
        "all mapped",
        "v2 parent",
        "v1",
        "over its limit",
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    assert Host(write(tmp_path, files)).available_bytes() == gib * GIB


def test_memory_is_the_tightest_cgroups_without_mapped_files(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/statm": f"9 9 {GIB // mmap.PAGESIZE} 1 0 1 0",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}",
        "sys/fs/cgroup/memory.current": f"{7 * GIB}",
        "sys/fs/cgroup/a/memory.max": f"{5 * GIB}",
        "sys/fs/cgroup/a/memory.current": f"{2 * GIB}",
    }
    assert Host(write(tmp_path / "bare", {})).total_bytes() == 32 * GIB
    host = Host(write(tmp_path / "container", files))
    assert (host.total_bytes(), host.left_bytes()) == (5 * GIB, GIB)


def test_replica_share_excludes_its_memory_and_counts_files_once(tmp_path: Path) -> None:
    pages = GIB // mmap.PAGESIZE
    host = Host(write(tmp_path, {"proc/self/statm": f"9 {3 * pages} {2 * pages} 1 0 1 0"}))
    assert (host.own_bytes(), host.own_bytes(2)) == (3 * GIB, 2 * GIB)
    memory, config = worker_cpu.CpuMemory(host), tiny_config(tensor_parallel_size=2)
    assert memory._free_bytes(config) == 14 * GIB
    for share, free in ((10, 6), (100, 14), (1, 0)):
        config = dataclasses.replace(config, share=HostShare(2, share * GIB))
        assert memory._free_bytes(config) == free * GIB


def topology(cores: list[int]) -> dict[str, str]:
    """CPU i is on core `cores[i]` of one package."""
    folder = "sys/devices/system/cpu/cpu{}/topology/"
    return {folder.format(i) + "core_id": str(core) for i, core in enumerate(cores)} | {
        folder.format(i) + "physical_package_id": "0" for i in range(len(cores))
    }


@pytest.mark.parametrize(
    ("files", "affinity", "threads"),
    [
        ({}, {0, 1, 2}, 3),
        (topology([0, 0, 1, 1]), {0, 1, 2, 3}, 2),
        (topology([0, 0, 1, 1]), {0, 1}, 1),
        (topology([0, 1, 2, 3]) | {"sys/fs/cgroup/cpu.max": "250000 100000"}, {0, 1, 2, 3}, 2),
        (topology([0, 1, 2, 3]) | {"sys/fs/cgroup/cpu.max": "50000 100000"}, {0, 1, 2, 3}, 1),
        (topology([0, 1]) | {"sys/fs/cgroup/cpu.max": "max 100000"}, {0, 1}, 2),
        (
            topology([0, 1])
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            {0, 1},
            1,
        ),
    ],
    ids=["no topology", "hyperthreads", "affinity", "quota", "small quota", "no quota", "v1 quota"],
)
def test_default_threads(
    tmp_path: Path,
    files: dict[str, str],
    affinity: set[int],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen: list[int] = []
    monkeypatch.setattr(worker_cpu, "set_num_threads", chosen.append)
    with caplog.at_level(logging.INFO):
        CpuDevice(Host(write(tmp_path, files))).start(tiny_config())
    assert chosen == [threads]
    assert f"cpu_threads = {threads}: " in caplog.text


def test_threads_are_as_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(worker_cpu, "set_num_threads", chosen.append)
    CpuDevice().start(tiny_config(cpu_threads=3))
    assert chosen == [3]


def test_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(worker_cpu, "set_num_threads", chosen.append)
    CpuDevice().start(tiny_config())
    assert chosen == [5]


def test_this_machine_can_be_read() -> None:
    assert Host().available_bytes() > 0


PINS = """
import os, pathlib
from quire.config import EngineConfig
from quire.worker.cpu import CpuDevice
CpuDevice().start(EngineConfig.from_args(cpu_threads=2, cpu_pin_threads=True))
free = sorted(os.sched_getaffinity(0))
tasks = [int(task.name) for task in pathlib.Path("/proc/self/task").iterdir()]
print(len(free), [sorted(cpus) for task in tasks if len(cpus := os.sched_getaffinity(task)) == 1] == [free[1:2]])
"""


@pytest.mark.skipif(library.loaded() is None or os.cpu_count() == 1, reason="nothing to pin to")
def test_threads_but_the_first_are_pinned() -> None:
    """In a process of its own, because threads stay pinned."""
    result = subprocess.run(
        [sys.executable, "-c", PINS], capture_output=True, text=True, check=True, timeout=120
    )
    num_free, pinned = result.stdout.split()
    assert (int(num_free), pinned) == (len(os.sched_getaffinity(0)), "True")


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_more_pinned_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_cpu, "set_num_threads", lambda count: None)
    with pytest.raises(ConfigError, match="needs a core for each of 4096 threads; there are"):
        CpuDevice().start(tiny_config(cpu_threads=4096, cpu_pin_threads=True))
