# SPDX-License-Identifier: Apache-2.0
"""Properties of the machine: devices usable by the installed torch, processors, memory, NUMA nodes.

Invariant: determined without importing torch, and never during a step. A device type is offered only if its
driver shows one and torch was built for it; the worker detects a driver that does not work.

`divided` is pure and assigns no core twice.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quire.vllm_names.imports import attributes_of


class Platform(NamedTuple):
    """Device type, under torch's name."""

    name: str
    builds: tuple[str, ...]  # Fields of torch/version.py, one of which is set in a build for this type.
    # Glob patterns below the root directory, one of which matches if there is a device.
    device_files: tuple[str, ...]
    visibility: tuple[str, ...]  # Environment variables that can hide the devices.


GPUS = (
    Platform(
        "cuda",
        ("cuda", "hip"),
        ("dev/nvidia[0-9]*", "dev/dxg", "dev/kfd"),
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    Platform("xpu", ("xpu",), ("dev/dri/renderD*",), ("ZE_AFFINITY_MASK",)),
)  # In the order of preference of `auto`; before the CPU. ROCm is cuda in torch.


def choose_device(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, torch_dir: Path | None = None
) -> tuple[str, str]:
    """Return the device type for `auto`, and the reason.

    Args:
        root: parent of /dev; replaced in tests.
        torch_dir: the torch package; None: the installed one.
    """
    builds = _torch_builds(torch_dir or _installed_torch())
    reasons = []
    for platform in GPUS:
        if not any(True for pattern in platform.device_files for _ in root.glob(pattern)):
            continue
        hidden = [name for name in platform.visibility if environ.get(name, "0") in ("", "-1")]
        if hidden:
            reasons.append(f"{hidden[0]} hides the {platform.name} devices")
        elif not builds & set(platform.builds):
            reasons.append(f"torch was built without {platform.name}")
        else:
            return platform.name, "the driver shows a device, and torch was built for it"
    return "cpu", "; ".join(reasons) or "no GPU was found"


def _installed_torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None, "torch is a dependency of quire"
    assert spec.origin is not None, "torch is no namespace package"
    return Path(spec.origin).parent


def _torch_builds(torch_dir: Path) -> set[str]:
    """Return the fields of torch/version.py that name its builds: lines such as `cuda: Optional[str] = '13.0'`."""
    text = (torch_dir / "version.py").read_text()
    return {match[1] for match in re.finditer(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]", text, re.MULTILINE)}


class NumaNode(NamedTuple):
    """NUMA node, with the processors of each physical core that this process may use."""

    number: int
    cores: list[tuple[int, ...]]


class Host:
    """Processors and memory that this process may use.

    Limits of control groups (versions 1 and 2) override the kernel's numbers for the whole machine.

    Args:
        root: parent of /proc and /sys; replaced in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def available_bytes(self) -> int:
        """Return the memory that this process can still take without evicting anything, including its own mapped
        weights.
        """
        return max(0, self.left_bytes() - self._mapped())

    def left_bytes(self) -> int:
        """Return the memory left before the machine or a control group runs out."""
        return min([self._meminfo("MemAvailable:"), *(left for left, _ in self._groups_of_memory())])

    def total_bytes(self) -> int:
        """Return the memory of the machine, or the limit of a control group."""
        return min([self._meminfo("MemTotal:"), *(limit for _, limit in self._groups_of_memory())])

    def own_bytes(self, num_sharers: int = 1) -> int:
        """Return the memory of this process; mapped files count by 1 / `num_sharers`."""
        _, resident, *_ = self._statm()
        return resident - self._mapped() + self._mapped() // num_sharers

    def processors(self) -> list[int]:
        """Return one processor of each physical core that this process may use."""
        return [core[0] for core in self.cores()]

    def cores(self) -> list[tuple[int, ...]]:
        """Return the processors of each physical core that this process may use."""
        cores: dict[str, list[int]] = {}
        for cpu in _usable_processors():
            cores.setdefault(self._core_of(cpu), []).append(cpu)
        return [tuple(cpus) for cpus in cores.values()]

    def nodes(self) -> list[NumaNode]:
        """Return the NUMA nodes of these cores; a single one if the system reports none."""
        number_of = dict(self._numbers_of_nodes())
        nodes: dict[int, list[tuple[int, ...]]] = {}
        for core in self.cores():
            nodes.setdefault(number_of.get(core[0], 0), []).append(core)
        return [NumaNode(number, nodes[number]) for number in sorted(nodes)]

    def node_bytes(self, number: int) -> int | None:
        """Return the memory of a NUMA node; None if unknown."""
        lines = (_read(self._root / f"sys/devices/system/node/node{number}/meminfo") or "").splitlines()
        found = [line.split() for line in lines if " MemTotal:" in line]
        return int(found[0][3]) * 1024 if found else None

    def num_threads(self) -> tuple[int, str]:
        """Return the number of compute threads that keep these processors busy, with the reason."""
        cores, quota = len(self.processors()), self._cpu_quota()
        if quota < cores:
            allowed = f"the control group allows {quota:g} processors of {cores} cores"
            return max(1, math.floor(quota)), allowed
        return cores, "one per physical core that this process may use"

    def _core_of(self, cpu: int) -> str:
        topology = self._root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = [_read(topology / name) for name in ("physical_package_id", "core_id")]
        return f"{siblings[0]}.{siblings[1]}" if None not in siblings else f"cpu{cpu}"

    def _cpu_quota(self) -> float:
        """Return the processors' worth of time that control groups grant; infinite without a limit."""
        quotas = [math.inf]
        for folder in self._groups(""):
            limit, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
            if limit != "max":
                quotas.append(int(limit) / int(period))
        for folder in self._groups("cpu"):
            limit, period = (
                _read(folder / "cpu.cfs_quota_us") or "-1",
                _read(folder / "cpu.cfs_period_us") or "1",
            )
            if int(limit) > 0:
                quotas.append(int(limit) / int(period))
        return min(quotas)

    def _meminfo(self, field: str) -> int:
        return _fields((self._root / "proc/meminfo").read_text())[field] * 1024

    def _mapped(self) -> int:
        """Return bytes of mapped files, which the kernel counts as available although they are in use."""
        return self._statm()[2]

    def _statm(self) -> list[int]:
        """Return bytes of this process's memory: size, resident, and resident file pages."""
        pages = (_read(self._root / "proc/self/statm") or "0 0 0").split()
        return [int(number) * mmap.PAGESIZE for number in pages[:3]]

    def _numbers_of_nodes(self) -> Iterator[tuple[int, int]]:
        """Yield each processor with its node number."""
        for folder in (self._root / "sys/devices/system/node").glob("node[0-9]*"):
            for cpu in _numbers(_read(folder / "cpulist") or ""):
                yield cpu, int(folder.name.removeprefix("node"))

    def _groups_of_memory(self) -> Iterator[tuple[int, int]]:
        """Yield (bytes left, limit) of each memory limit; cached file pages, which are evicted first, count as free."""
        for controller, limit_file, usage_file, cache_field in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for folder in self._groups(controller):
                limit, usage = _read(folder / limit_file), _read(folder / usage_file)
                if limit is None or usage is None or limit == "max":
                    continue
                cached = _fields(_read(folder / "memory.stat") or "").get(cache_field, 0)
                yield max(0, int(limit) - int(usage) + cached), int(limit)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's control group and its parents: version 2 for "", else a version 1
        controller.

        Inside a container the named folder may not be visible while the mounted root is its own group.
        """
        base = self._root / "sys/fs/cgroup" / controller
        for line in (_read(self._root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                yield from (base / folder for folder in (own, *own.parents) if folder != Path())
        yield base


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # absent or unreadable: no known limit
        return None


def _fields(text: str) -> dict[str, int]:
    """Parse lines of the form "name number [unit]"."""
    return {name: int(value) for name, value, *_ in map(str.split, text.splitlines())}


def _usable_processors() -> list[int]:
    """Return this process's processors; all if the affinity is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _numbers(text: str) -> Iterator[int]:
    """Parse a kernel list such as "0-3,8"."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


T = TypeVar("T")
Core = tuple[int, ...]  # Processors of a physical core.


def divide_cores(nodes: Sequence[NumaNode], num: int) -> list[list[Core]]:
    """Divide the cores into `num` nearly equal parts, in node order.

    If the parts can be spread evenly over the nodes, each has cores of a single node; with more nodes than parts, each
    may have whole nodes.
    """
    per_node, rest = divmod(num, len(nodes))
    if rest or any(len(node.cores) < per_node for node in nodes):
        return _parts([core for node in nodes for core in node.cores], num)
    return [part for node in nodes for part in _parts(node.cores, per_node)]


def nodes_of(cores: Sequence[Core], nodes: Sequence[NumaNode]) -> list[int]:
    """Return the numbers of the nodes with these cores."""
    return [node.number for node in nodes if set(cores).intersection(node.cores)]


def format_processors(processors: Sequence[int]) -> str:
    """Format processors like the kernel: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(processors):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _parts(items: Sequence[T], count: int) -> list[list[T]]:
    """Split into `count` parts of nearly equal size, in order."""
    ends = [len(items) * place // count for place in range(count + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
