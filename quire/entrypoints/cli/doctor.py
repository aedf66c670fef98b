"""`quire doctor`: what quire runs on, what it chose, and what is wrong.

Invariant: every section can be reported on a broken installation; a fault is a `Problem` with a hint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click

from quire.config import DEMO_MODEL
from quire.entrypoints.cli import machine
from quire.errors import StartupError
from quire.placement import shown
from quire.platforms import Host
from quire.version import __version__, version_of

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
OLDEST_TORCH = (2, 11)
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec")
REINSTALL = "install a C++ compiler (Debian: apt-get install g++) and then quire again"


@dataclass(frozen=True)
class Problem:
    """Something wrong, and what to do about it."""

    what: str
    hint: str


@dataclass(frozen=True)
class Section:
    """One part of the report."""

    title: str
    facts: dict[str, str]
    problems: list[Problem] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The section for people."""
        width = max(map(len, self.facts), default=0)
        return [self.title, *(f"  {name:{width}}  {value}" for name, value in self.facts.items())]


def machine_section() -> Section:
    """Processor, memory and operating system."""
    memory = machine.memory_gib()
    facts = {
        "CPU": machine.cpu_model(),
        "cores": f"{machine.num_cores()} available to this process",
        **node_facts(Host()),
        "instruction sets": " ".join(machine.instruction_sets()) or machine.UNKNOWN,
        "memory": "{:.1f} GiB, {:.1f} GiB available".format(*memory) if memory else machine.UNKNOWN,
        "system": platform.platform(),
    }
    return Section("Machine", facts)


def node_facts(host: Host) -> dict[str, str]:
    """Of each NUMA node: the processors that this process may use, and memory; replicas keep to nodes."""
    return {
        f"NUMA node {node.number}": f"processors {shown([cpu for core in node.cores for cpu in core])} "
        f"({len(node.cores)} physical cores), {_gib(host.node_bytes(node.number))} of memory"
        for node in host.nodes()
    }


def _gib(num_bytes: int | None) -> str:
    return machine.UNKNOWN if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def versions_section() -> Section:
    """quire, Python and the packages that matter."""
    facts = {"quire": __version__, "python": platform.python_version()}
    facts |= {package: version_of(package) or "not installed" for package in PACKAGES}
    problems = [
        *python_problems(sys.version_info[:2]),
        *torch_problems(version_of("torch")),
    ]
    return Section("Versions", facts, problems)


def python_problems(version: tuple[int, ...]) -> list[Problem]:
    """What is wrong with this version of Python."""
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return []
    hint = f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    return [Problem(f"Python {_dotted(version)} is not supported", hint)]


def torch_problems(version: str | None) -> list[Problem]:
    """What is wrong with this version of torch."""
    hint = f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"
    if version is None:
        return [Problem("torch is not installed", hint)]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return [Problem(f"torch {version} is too old", hint)]
    return []


def native_library_section() -> Section:
    """The C++ kernels: which were loaded, or why none."""
    title = "Native library"
    try:
        import torch

        from quire.kernels.cpu import library

        loaded, status = library.loaded(), library.status()
    except ValueError as error:
        return Section(
            title, {"state": "not loaded"}, [Problem(str(error), "correct or unset QUIRE_CPU_ISA")]
        )
    except (ImportError, OSError, RuntimeError, StartupError) as error:
        return Section(title, {"state": "not loaded"}, [Problem(str(error), REINSTALL)])
    if loaded is None:
        return Section(title, {"state": status}, [Problem(status, REINSTALL)])
    facts = {"state": status, "file": str(library.PATH), "threads": str(torch.get_num_threads())}
    return Section(title, facts | instruction_set_facts(loaded.isa, loaded.missing))


def instruction_set_facts(used: str, missing: Mapping[str, str | None]) -> dict[str, str]:
    """For each instruction set that kernels are written for, best first: whether it is used, or why not."""
    reasons = {name: reason or f"not used: {used} is chosen" for name, reason in missing.items()}
    return reasons | {used: "used"}


def kernels_section() -> Section:
    """For each op, the implementations tried in float32 on the CPU, in order."""
    title = "Kernels (float32 on the CPU)"
    try:
        import torch

        from quire.kernels import ops

        table = ops.describe("cpu", torch.float32)
    except (ImportError, OSError, ValueError, RuntimeError, StartupError) as error:
        return Section(
            title, {}, [Problem(f"the kernels cannot be chosen: {error}", "see the sections above")]
        )
    facts = {row.op: f"{', then '.join(row.implementations)} ({row.reason})" for row in table}
    return Section(title, facts)


def tapes_section() -> Section:
    """Which ops keep decode steps off tapes; a model that asks torch for something else says so when it starts."""
    title = "Tapes (decode steps on the CPU)"
    try:
        import torch

        from quire.kernels import ops

        table = ops.describe("cpu", torch.float32)
    except (ImportError, OSError, ValueError, RuntimeError, StartupError):
        return Section(title, {"state": "see the kernels above"})
    without = [row.op for row in table if "cpu" not in row.implementations]
    return Section(title, {"not recorded": f"steps of a model that needs one of {', '.join(without)}"})


def openmp_section() -> Section:
    """The OpenMP runtimes in this process, after torch and the kernels were loaded."""
    runtimes = machine.openmp_runtimes()
    facts = {f"runtime {number}": path for number, path in enumerate(runtimes, start=1)}
    facts["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "not set")
    return Section("OpenMP", facts, openmp_problems(runtimes))


def openmp_problems(runtimes: list[str]) -> list[Problem]:
    """More than one runtime in a process: each starts its own threads."""
    if len(runtimes) <= 1:
        return []
    what = f"{len(runtimes)} OpenMP runtimes are loaded: {' and '.join(runtimes)}"
    return [Problem(what, "install quire again with this torch")]


def demo_model_section() -> Section:
    """The model in the box."""
    try:
        from quire.models.checkpoint import resolve_model_dir

        directory = resolve_model_dir(DEMO_MODEL, None, None)
    except StartupError as error:
        problem = Problem(str(error), "install quire again, or name a model: quire serve MODEL")
        return Section("Model in the box", {"directory": "missing"}, [problem])
    return Section("Model in the box", {"directory": str(directory)})


SECTIONS: tuple[Callable[[], Section], ...] = (
    machine_section,
    versions_section,
    native_library_section,
    kernels_section,
    tapes_section,
    openmp_section,
    demo_model_section,
)
"""The report, in order; OpenMP stands after what loads it."""


def report(sections: list[Section]) -> list[str]:
    """All sections, then what is wrong, for people."""
    problems = [problem for section in sections for problem in section.problems]
    lines = [line for section in sections for line in [*section.lines(), ""]]
    if not problems:
        return [*lines, "Nothing is wrong."]
    return [*lines, f"Wrong ({len(problems)}):", *(f"  {one.what}\n    hint: {one.hint}" for one in problems)]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> int:
    """Show machine, versions and chosen kernels, and what is wrong.

    The exit code is 1 if something is wrong.
    """
    sections = [section() for section in SECTIONS]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(section) for section in sections], indent=2))
    else:
        click.echo("\n".join(report(sections)))
    return 1 if any(section.problems for section in sections) else 0


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
