# SPDX-License-Identifier: Apache-2.0
"""`quire collect-env`: environment report for an issue.

Invariant: it contains no secret and no user name: variables that hold keys are masked, and the home directory is `~`.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from quire.entrypoints.cli.doctor import SECTIONS, ReportSection, report

OUR_VARIABLES = (
    "QUIRE_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "CUDA_",
    "NVIDIA_",
    "PYTORCH_",
    "TORCH_",
    "HF_",
    "LD_",
    "PYTHON",
)  # Prefixes of environment variables that affect quire.
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
CGROUP = Path("/sys/fs/cgroup")


@click.command("collect-env")
def collect_env() -> None:
    """Print the environment report for an issue: `quire doctor` and more, ready to be pasted."""
    sections = [*(section() for section in SECTIONS), gpu_section(), limits_section()]
    sections += [variables_section(os.environ), packages_section()]
    text = "\n".join(report(sections)).replace(str(Path.home()), "~")
    click.echo(f"```text\n{text}\n```")


def gpu_section() -> ReportSection:
    """Return the accelerators that torch detects."""
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts = {"CUDA of torch": str(torch.version.cuda or "none")}
    except (ImportError, OSError, RuntimeError) as error:
        return ReportSection("GPU", {"torch": str(error)})
    return ReportSection("GPU", facts | {f"GPU {index}": name for index, name in enumerate(names)})


def limits_section(cgroup: Path = CGROUP) -> ReportSection:
    """Return the limits of the operating system or container."""
    facts = {name: _first_line(cgroup / name) for name in ("cpu.max", "memory.max")}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ReportSection("Limits", {**facts, "open files": f"{soft} (hard {hard})"})


def variables_section(environment: Mapping[str, str]) -> ReportSection:
    """Return the relevant environment variables; keys are masked."""
    facts = {}
    for name in sorted(environment):
        if name.startswith(OUR_VARIABLES):
            facts[name] = "(set)" if any(word in name for word in SECRET) else environment[name]
    return ReportSection("Environment variables", facts)


def packages_section() -> ReportSection:
    """Return all installed packages, and the path of Python."""
    found = {dist.metadata["Name"] or "?": dist.version for dist in importlib.metadata.distributions()}
    return ReportSection(
        "Packages",
        {"(python)": sys.executable, **dict(sorted(found.items(), key=lambda one: one[0].lower()))},
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "no limit"
