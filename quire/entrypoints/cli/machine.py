"""Facts about this machine, read from Linux's /proc where it is there; "unknown" where it is not."""

from __future__ import annotations

import os
import platform
from pathlib import Path

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
)
"""Names, as the kernel spells them, of what matters to matrix arithmetic on x86 and Arm."""


def cpu_model(proc: Path = PROC) -> str:
    """The processor's name."""
    return _first_value(proc / "cpuinfo", "model name") or platform.machine() or UNKNOWN


def instruction_sets(proc: Path = PROC) -> list[str]:
    """Which of `INSTRUCTION_SETS` the processor has."""
    flags = _first_value(proc / "cpuinfo", "flags") or _first_value(proc / "cpuinfo", "Features") or ""
    return [name for name in INSTRUCTION_SETS if name in flags.split()]


def num_cores() -> int:
    """Logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib(proc: Path = PROC) -> tuple[float, float] | None:
    """(total, available) memory in GiB."""
    values = [_first_value(proc / "meminfo", name) for name in ("MemTotal", "MemAvailable")]
    if None in values:
        return None
    total, available = (int(value.split()[0]) / 2**20 for value in values if value)
    return total, available


def openmp_runtimes(proc: Path = PROC) -> list[str]:
    """Files of the OpenMP runtimes that this process has loaded; two of them fight over the cores."""
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
