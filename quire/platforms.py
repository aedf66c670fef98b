"""What this machine has: kinds of devices that the installed torch can use, processors and memory.

Invariant: found out without importing torch, and never from inside a step. A kind of device is offered only if its
driver shows one and torch was built for it; whether the driver really works is seen when the worker starts the device.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Platform(NamedTuple):
    """One kind of device, under torch's name for it."""

    name: str
    builds: tuple[str, ...]
    """Fields of torch/version.py, one of which is set in a build for this kind."""
    device_files: tuple[str, ...]
    """Patterns below the root directory, one of which matches if there is a device."""
    visibility: tuple[str, ...]
    """Environment variables that can hide the devices."""


GPUS = (
    Platform(
        "cuda",
        ("cuda", "hip"),
        ("dev/nvidia[0-9]*", "dev/dxg", "dev/kfd"),
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    Platform("xpu", ("xpu",), ("dev/dri/renderD*",), ("ZE_AFFINITY_MASK",)),
)
"""In the order in which `auto` prefers them; before the CPU. ROCm calls itself cuda in torch."""


def choose_device(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, torch_dir: Path | None = None
) -> tuple[str, str]:
    """The kind of device that `auto` stands for, and the reason.

    Args:
        root: where /dev is; tests put their own there.
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
    """Fields of torch/version.py that name what it was built for: lines such as `cuda: Optional[str] = '13.0'`."""
    text = (torch_dir / "version.py").read_text()
    return {match[1] for match in re.finditer(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]", text, re.MULTILINE)}


class Node(NamedTuple):
    """A NUMA node, and the processors of each physical core there that this process may use."""

    number: int
    cores: list[tuple[int, ...]]


class Host:
    """What this process may use of its machine's processors and memory.

    A container is believed over its host: limits of control groups (versions 1 and 2) bound what the kernel says of the
    whole machine.

    Args:
        root: where /proc and /sys are; tests put their own there.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def available_bytes(self) -> int:
        """Memory that this process can still take without pushing anyone out, nor its own mapped weights."""
        return max(0, self.left_bytes() - self._mapped())

    def left_bytes(self) -> int:
        """Memory that anyone here can still take before the machine or a control group is out of it."""
        return min([self._meminfo("MemAvailable:"), *(left for left, _ in self._groups_of_memory())])

    def total_bytes(self) -> int:
        """Memory that there is, or that a control group grants."""
        return min([self._meminfo("MemTotal:"), *(limit for _, limit in self._groups_of_memory())])

    def own_bytes(self, num_sharers: int = 1) -> int:
        """Memory that this process has; of mapped files, the part of one of so many processes that map them."""
        _, resident, *_ = self._statm()
        return resident - self._mapped() + self._mapped() // num_sharers

    def processors(self) -> list[int]:
        """One processor of each physical core that this process may use."""
        return [core[0] for core in self.cores()]

    def cores(self) -> list[tuple[int, ...]]:
        """The processors of each physical core that this process may use."""
        cores: dict[str, list[int]] = {}
        for cpu in sorted(os.sched_getaffinity(0)):
            cores.setdefault(self._core_of(cpu), []).append(cpu)
        return [tuple(cpus) for cpus in cores.values()]

    def nodes(self) -> list[Node]:
        """The NUMA nodes of these cores; one, where the system knows of none."""
        number_of = dict(self._numbers_of_nodes())
        nodes: dict[int, list[tuple[int, ...]]] = {}
        for core in self.cores():
            nodes.setdefault(number_of.get(core[0], 0), []).append(core)
        return [Node(number, nodes[number]) for number in sorted(nodes)]

    def node_bytes(self, number: int) -> int | None:
        """Memory of a NUMA node; None where the system does not say."""
        lines = (_read(self._root / f"sys/devices/system/node/node{number}/meminfo") or "").splitlines()
        found = [line.split() for line in lines if " MemTotal:" in line]
        return int(found[0][3]) * 1024 if found else None

    def num_threads(self) -> tuple[int, str]:
        """Compute threads that keep these processors busy, with the reason."""
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
        """Processors' worth of time that control groups grant; infinite if none limits it."""
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
        """Bytes of files in this process's memory: available as the kernel sees it, but in use."""
        return self._statm()[2]

    def _statm(self) -> list[int]:
        """Bytes of this process's memory: size, resident, and of that what is of files."""
        pages = (_read(self._root / "proc/self/statm") or "0 0 0").split()
        return [int(number) * mmap.PAGESIZE for number in pages[:3]]

    def _numbers_of_nodes(self) -> Iterator[tuple[int, int]]:
        """Each processor, and the number of its node."""
        for folder in (self._root / "sys/devices/system/node").glob("node[0-9]*"):
            for cpu in _numbers(_read(folder / "cpulist") or ""):
                yield cpu, int(folder.name.removeprefix("node"))

    def _groups_of_memory(self) -> Iterator[tuple[int, int]]:
        """What is left under each memory limit, and the limit; cached file pages, which the kernel drops first, do not
        count as used.
        """
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
        """Folders of this process's control group and its parents: version 2 for "", else a version 1
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
    except OSError:  # not there, or not for us to see: it then limits nothing that we can know of
        return None


def _fields(text: str) -> dict[str, int]:
    """Lines of the form "name number [unit]"."""
    return {name: int(value) for name, value, *_ in map(str.split, text.splitlines())}


def _numbers(text: str) -> Iterator[int]:
    """Of a list as the kernel writes it: "0-3,8"."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
