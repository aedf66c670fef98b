# SPDX-License-Identifier: Apache-2.0
"""Packages for PyPI in a folder: `python tools/packages.py [--to dist] [--machine x86_64 --machine aarch64]`.

One sdist, and a wheel for each machine with the kernels of all its instruction sets, tagged manylinux by auditwheel.
The library has a C ABI, so that one wheel serves every version of Python. Other machines' kernels are cross-compiled by
Debian's compiler, or by Zig's (`ziglang` of PyPI), which brings the glibc that the wheel is for.

It runs in an environment that has `build`, `wheel` and `auditwheel` (`make wheel`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = Path("quire/kernels/cpu/libquire_cpu.so")
MACHINES = ("x86_64", "aarch64")
DEBIAN = {"x86_64": "g++-x86-64-linux-gnu", "aarch64": "g++-aarch64-linux-gnu"}
"""Debian's packages with the cross compilers, for messages."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Numbers of the machines in the header of an ELF file."""
GLIBC = "2.28"
"""Oldest glibc that a wheel is for, which is that of torch's wheels."""
POLICY = "manylinux_2_28"
ZIG_NAMES = """\
for argument do
  shift
  case $argument in -march=armv8.2-a*) argument=-mcpu=generic+v8_2a${argument#-march=armv8.2-a};; esac
  set -- "$@" "$argument"
done
"""
"""Lines of a shell script that replace GCC's names of Arm's architectures by those that Zig knows."""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a program of this environment or of the system.

    Raises:
        SystemExit: it fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, check=False, env=os.environ | {"PATH": path}
    )
    if done.returncode != 0:
        sys.exit(f"error: {command[0]} failed (exit code {done.returncode}): {' '.join(map(str, command))}")


def compiler_for(machine: str) -> list[str] | None:
    """Return the command of the C++ compiler for a machine, None if it is not installed."""
    own = os.environ.get("CXX", "c++")
    native = machine == platform.machine()
    path = shutil.which(own if native else f"{machine}-linux-gnu-g++")
    if path is not None:
        return [path]
    if native or importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}"]


def as_program(command: list[str], folder: Path) -> str:
    """Return the path of a program that runs a command, as CMake needs; one is written if it has arguments."""
    if len(command) == 1:
        return command[0]
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\n{ZIG_NAMES}exec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return str(program)


def check_machine(library: Path, machine: str) -> None:
    """End the program if a library is for another machine.

    Raises:
        SystemExit: it is, or is no ELF file.
    """
    with library.open("rb") as file:
        header = file.read(20)
    if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != ELF_MACHINES[machine]:
        sys.exit(f"error: {library} is no library for {machine}")


def default_machines() -> list[str]:
    """Return the machines that can be compiled for; says which cannot."""
    found = [machine for machine in MACHINES if compiler_for(machine)]
    for machine in sorted(set(MACHINES) - set(found)):
        print(
            f"no wheel for {machine}: its compiler is not installed (Debian: apt install {DEBIAN[machine]}; "
            "or pip install ziglang)"
        )
    return found


def compile_kernels(machine: str, to: Path) -> Path:
    """Compile the kernels of all instruction sets of a machine, and return the library below `to`."""
    native = machine == platform.machine()
    folder = ROOT / "build" / f"wheel-{machine}"
    command = compiler_for(machine)
    if command is None:
        sys.exit(f"error: no C++ compiler for {machine}")
    cross = [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
        f"-DCMAKE_CXX_COMPILER={as_program(command, folder)}",
    ]
    fresh = not (folder / "CMakeCache.txt").exists()
    ninja = ["-GNinja"] if fresh and shutil.which("ninja") else []
    run(
        "cmake",
        "-S",
        ROOT / "csrc/cpu",
        "-B",
        folder,
        *ninja,
        "-DQUIRE_ISAS=all",
        "-DQUIRE_COMPLETE=ON",
        *([] if len(command) > 1 else [f"-DCMAKE_CXX_FLAGS=-include {ROOT / 'tools/glibc_2_28.h'}"]),
        *([] if native else cross),
    )
    run("cmake", "--build", folder, "--parallel", str(os.cpu_count() or 1))
    run("cmake", "--install", folder, "--strip", "--prefix", to)
    check_machine(to / LIBRARY, machine)
    return to / LIBRARY


def with_library(pure: Path, library: Path, machine: str, to: Path) -> Path:
    """Write the wheel of a machine: the files of one without kernels, and the library.

    Returns:
        Path of the wheel, tagged `py3-none-linux_MACHINE`.
    """
    run(sys.executable, "-m", "wheel", "unpack", pure, "--dest", to)
    (folder,) = (path for path in to.iterdir() if path.is_dir())
    shutil.copy(library, folder / LIBRARY)
    (facts,) = folder.glob("*.dist-info/WHEEL")
    text = re.sub(r"(?m)^Tag: .*$", f"Tag: py3-none-linux_{machine}", facts.read_text())
    facts.write_text(re.sub(r"(?m)^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", text))
    run(sys.executable, "-m", "wheel", "pack", folder, "--dest-dir", to)
    (wheel,) = to.glob("*.whl")
    return wheel


def make_packages(to: Path, machines: list[str]) -> list[Path]:
    """Write the packages and return their paths."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", to, ROOT)
        run(sys.executable, "-m", "build", "--wheel", "-Cwheel.cmake=false", "--outdir", work, ROOT)
        (pure,) = work.glob("*-py3-none-any.whl")
        for machine in machines:
            folder = work / machine
            folder.mkdir()
            library = compile_kernels(machine, work / f"installed-{machine}")
            wheel = with_library(pure, library, machine, folder)
            run(
                sys.executable,
                "-m",
                "auditwheel",
                "repair",
                "--plat",
                f"{POLICY}_{machine}",
                "--wheel-dir",
                to,
                wheel,
            )
    return sorted(path for path in to.iterdir() if path.is_file())


def main() -> int:
    """Write the packages named by the arguments; nothing may be in the folder before."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="Folder for the packages; made anew.")
    parser.add_argument(
        "--machine",
        action="append",
        choices=MACHINES,
        help="Machine of a wheel; default: all that can be compiled for.",
    )
    arguments = parser.parse_args()
    machines = arguments.machine or default_machines()
    missing = [machine for machine in machines if not compiler_for(machine)]
    if missing or not machines:
        lacking = missing or [platform.machine()]
        sys.exit(f"error: no C++ compiler for {', '.join(lacking)}: a wheel without kernels is not released")
    shutil.rmtree(arguments.to, ignore_errors=True)
    arguments.to.mkdir(parents=True)
    for path in make_packages(arguments.to.resolve(), machines):
        print(
            f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}  {path.stat().st_size / 2**20:.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
