# SPDX-License-Identifier: Apache-2.0
"""`quire doctor`: machine, versions, chosen kernels, and problems.

Invariant: every section can be reported on a broken installation; a fault is a `DoctorProblem` with a hint. Facts about
the machine come from Linux's /proc, and are "unknown" without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from quire.config import DEMO_MODEL
from quire.errors import StartupError
from quire.platforms import Host, format_processors
from quire.version import __version__, version_of

PROC = Path("/proc")
UNKNOWN = "unknown"

INSTRUCTION_SETS = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)  # Instruction sets relevant to matrix arithmetic on x86 and Arm, as the kernel spells them.

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
OLDEST_TORCH = (2, 11)
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec")
MAX_FACTS, MAX_NAMES = 20, 9
"""Facts of a section, and names of one fact, that a short report lists one by one."""
REINSTALL = "install a C++ compiler (Debian: apt-get install g++) and then quire again"


def cpu_model(proc: Path = PROC) -> str:
    """Return the processor's name."""
    return _first_value(proc / "cpuinfo", "model name") or platform.machine() or UNKNOWN


def instruction_sets(proc: Path = PROC) -> list[str]:
    """Return the processor's members of `INSTRUCTION_SETS`."""
    flags = _first_value(proc / "cpuinfo", "flags") or _first_value(proc / "cpuinfo", "Features") or ""
    return [name for name in INSTRUCTION_SETS if name in flags.split()]


def num_cores() -> int:
    """Return the number of logical processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib(proc: Path = PROC) -> tuple[float, float] | None:
    """Return (total, available) memory in GiB."""
    values = [_first_value(proc / "meminfo", name) for name in ("MemTotal", "MemAvailable")]
    if None in values:
        return None
    total, available = (int(value.split()[0]) / 2**20 for value in values if value)
    return total, available


def openmp_runtimes(proc: Path = PROC) -> list[str]:
    """Return the files of the loaded OpenMP runtimes; two of them compete for the cores."""
    maps = _read(proc / "self" / "maps")
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    return sorted(
        path for path in paths if Path(path).name.startswith(("libgomp.", "libgomp-", "libiomp5.", "libomp."))
    )


def _first_value(path: Path, key: str) -> str | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class DoctorProblem:
    """A problem, and how to solve it."""

    what: str
    hint: str


@dataclass(frozen=True)
class ReportSection:
    """One section of the report."""

    title: str
    facts: dict[str, str]
    problems: list[DoctorProblem] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the section as text."""
        width = max(map(len, self.facts), default=0)
        return [self.title, *(f"  {name:{width}}  {value}" for name, value in self.facts.items())]

    def short_lines(self) -> list[str]:
        """Return the section as text; in a long one, ops of one value are one line."""
        if len(self.facts) <= MAX_FACTS:
            return self.lines()
        groups: dict[str, list[str]] = {}
        for name, value in self.facts.items():
            groups.setdefault(value, []).append(name)
        facts = (f"  {_listed(names)}: {value}" for value, names in groups.items())
        return [f"{self.title}; `quire doctor --all` lists each op", *facts]


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} ops"


def machine_section() -> ReportSection:
    """Return processor, memory and operating system."""
    memory = memory_gib()
    facts = {
        "CPU": cpu_model(),
        "cores": f"{num_cores()} available to this process",
        **node_facts(Host()),
        "instruction sets": " ".join(instruction_sets()) or UNKNOWN,
        "memory": "{:.1f} GiB, {:.1f} GiB available".format(*memory) if memory else UNKNOWN,
        "system": platform.platform(),
    }
    return ReportSection("Machine", facts)


def node_facts(host: Host) -> dict[str, str]:
    """Return processors and memory of each NUMA node; replicas are placed by node."""
    return {
        f"NUMA node {node.number}": f"processors {format_processors([cpu for core in node.cores for cpu in core])} "
        f"({len(node.cores)} physical cores), {_gib(host.node_bytes(node.number))} of memory"
        for node in host.nodes()
    }


def _gib(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def versions_section() -> ReportSection:
    """Return the versions of quire, Python and the main packages."""
    facts = {"quire": __version__, "python": platform.python_version()}
    facts |= {package: version_of(package) or "not installed" for package in PACKAGES}
    problems = [
        *python_problems(sys.version_info[:2]),
        *torch_problems(version_of("torch")),
    ]
    return ReportSection("Versions", facts, problems)


def python_problems(version: tuple[int, ...]) -> list[DoctorProblem]:
    """Return the problems of this Python version."""
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return []
    hint = f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    return [DoctorProblem(f"Python {_dotted(version)} is not supported", hint)]


def torch_problems(version: str | None) -> list[DoctorProblem]:
    """Return the problems of this torch version."""
    hint = f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"
    if version is None:
        return [DoctorProblem("torch is not installed", hint)]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return [DoctorProblem(f"torch {version} is too old", hint)]
    return []


def native_library_section() -> ReportSection:
    """Return the state of the C++ kernels, or why they are not loaded."""
    title = "Native library"
    try:
        import torch

        from quire.kernels import cpu
        from quire.kernels.cpu import library

        loaded, status = library.loaded(), library.status()
    except ValueError as error:
        return ReportSection(
            title, {"state": "not loaded"}, [DoctorProblem(str(error), "correct or unset QUIRE_CPU_ISA")]
        )
    except (ImportError, OSError, RuntimeError, StartupError) as error:
        return ReportSection(title, {"state": "not loaded"}, [DoctorProblem(str(error), REINSTALL)])
    if loaded is None:
        return ReportSection(title, {"state": status}, [DoctorProblem(status, REINSTALL)])
    facts = {"state": status, "file": str(cpu.PATH), "threads": str(torch.get_num_threads())}
    return ReportSection(title, facts | instruction_set_facts(loaded.isa, loaded.missing))


def instruction_set_facts(used: str, missing: Mapping[str, str | None]) -> dict[str, str]:
    """Return for each instruction set with kernels, best first, whether it is used, or why not."""
    reasons = {name: reason or f"not used: {used} is chosen" for name, reason in missing.items()}
    return reasons | {used: "used"}


def kernels_section() -> ReportSection:
    """Return for each op the implementations tried in float32 on the CPU, in order."""
    title = "Kernels (float32 on the CPU)"
    try:
        import torch

        from quire.kernels import ops

        table = ops.describe("cpu", torch.float32)
    except (ImportError, OSError, ValueError, RuntimeError, StartupError) as error:
        return ReportSection(
            title, {}, [DoctorProblem(f"the kernels cannot be selected: {error}", "see the sections above")]
        )
    facts = {row.op: f"{', then '.join(row.implementations)} ({row.reason})" for row in table}
    return ReportSection(title, facts)


def recorded_graphs_section() -> ReportSection:
    """Return the ops that prevent recording of decode steps. A model that needs other torch ops reports that at
    start.
    """
    title = "Recorded kernel graphs (decode steps on the CPU)"
    try:
        import torch

        from quire.kernels import ops

        table = ops.describe("cpu", torch.float32)
    except (ImportError, OSError, ValueError, RuntimeError, StartupError):
        return ReportSection(title, {"state": "see the kernels above"})
    without = [row.op for row in table if "cpu" not in row.implementations]
    return ReportSection(title, {"not recorded": f"steps of a model that needs one of {', '.join(without)}"})


def openmp_section() -> ReportSection:
    """Return the loaded OpenMP runtimes, after torch and the kernels were loaded."""
    runtimes = openmp_runtimes()
    facts = {f"runtime {number}": path for number, path in enumerate(runtimes, start=1)}
    facts["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "not set")
    return ReportSection("OpenMP", facts, openmp_problems(runtimes))


def openmp_problems(runtimes: list[str]) -> list[DoctorProblem]:
    """Return a problem if there is more than one runtime: each starts its own threads."""
    if len(runtimes) <= 1:
        return []
    what = f"{len(runtimes)} OpenMP runtimes are loaded: {' and '.join(runtimes)}"
    return [DoctorProblem(what, "install quire again with this torch")]


def demo_model_section() -> ReportSection:
    """Return the state of the bundled demo model."""
    try:
        from quire.models.checkpoint import resolve_model_dir

        directory = resolve_model_dir(DEMO_MODEL, None, None)
    except StartupError as error:
        problem = DoctorProblem(str(error), "install quire again, or name a model: quire serve MODEL")
        return ReportSection("Model in the box", {"directory": "missing"}, [problem])
    return ReportSection("Model in the box", {"directory": str(directory)})


SECTIONS: tuple[Callable[[], ReportSection], ...] = (
    machine_section,
    versions_section,
    native_library_section,
    kernels_section,
    recorded_graphs_section,
    openmp_section,
    demo_model_section,
)  # Sections in order; OpenMP comes after what loads it.


def report(sections: list[ReportSection], *, is_short: bool = False) -> list[str]:
    """Return all sections, then the problems, as lines of text."""
    problems = [problem for section in sections for problem in section.problems]
    lines = [
        line
        for section in sections
        for line in [*(section.short_lines() if is_short else section.lines()), ""]
    ]
    if not problems:
        return [*lines, "Nothing is wrong."]
    return [*lines, f"Wrong ({len(problems)}):", *(f"  {one.what}\n    hint: {one.hint}" for one in problems)]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--all", "is_whole", is_flag=True, help="List the kernels of each op by itself.")
def doctor(as_json: bool, is_whole: bool) -> int:
    """Show machine, versions and chosen kernels, and what is wrong.

    The exit code is 1 if something is wrong.
    """
    sections = [section() for section in SECTIONS]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(section) for section in sections], indent=2))
    else:
        click.echo("\n".join(report(sections, is_short=not is_whole)))
    return 1 if any(section.problems for section in sections) else 0


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
