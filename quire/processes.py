# SPDX-License-Identifier: Apache-2.0
"""Python child processes: their start, frames over their pipes, and descriptions of their ends; garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # library threads do not survive a fork
_SIZE = struct.Struct("<I")  # of a frame
# Collector threshold; Python's default is 700. A request leaves few objects that only the collector can free.
COLLECT_AFTER = 10_000

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that reach whole process groups (Ctrl-C, a closed terminal, a service manager). Children that end with their
parent ignore them.
"""

LAST_IMPORTS = "QUIRE_LAST_IMPORTS"
"""Variable with the directory where a child finds modules that are nowhere else: a user's `http.py` hides none."""
PATH_VARIABLES = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"),
    *("TRITON_CACHE_DIR", "QUIRE_CPU_LIBRARY"),
)  # Environment variables with paths that may be relative to the working directory.


def start_python(
    program: Sequence[str], environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """Start Python with these arguments in `/`, independent of a working directory that may be deleted.

    Args:
        options: of `Popen`.

    Raises:
        OSError: the machine refuses a process.
    """
    command = [sys.executable, "-P", *program]
    return subprocess.Popen(command, cwd="/", env=child_environment(environment), **options)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment for another directory, with absolute paths and this process's imports."""
    with suppress(FileNotFoundError):  # the working directory was deleted
        here = os.getcwd()
        relative = {name: environment[name] for name in PATH_VARIABLES if environment.get(name)}
        absolute = {
            name: os.pathsep.join(os.path.join(here, path) for path in paths.split(os.pathsep) if path)
            for name, paths in relative.items()
        }
        own = [os.path.join(here, path) for path in _paths_of_the_program()]
        imports = dict.fromkeys([*own, *absolute.get("PYTHONPATH", "").split(os.pathsep)])
        paths = [path.rstrip("/") for path in imports if path not in ("", "/")]
        last = {} if here == "/" else {LAST_IMPORTS: here}  # "/": this process is a child itself
        return {**environment, **absolute, **last, "PYTHONPATH": os.pathsep.join(paths)}
    return dict(environment)


def _paths_of_the_program() -> list[str]:
    """Return the entries of `sys.path` before the standard library; a child has the later ones itself."""
    library = sysconfig.get_path("stdlib")
    names = {library, str(Path(library).parent / f"python{sys.version_info[0]}{sys.version_info[1]}.zip")}
    first = next((place for place, path in enumerate(sys.path) if path in names), len(sys.path))
    return sys.path[:first]


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without the garbage collector; for quire's own processes only, since other garbage stays, too."""
    begin_imports()
    try:
        yield
    finally:
        end_imports()


def begin_imports() -> None:
    """Stop the collector, which would walk all modules repeatedly and free almost nothing."""
    gc.disable()


def end_imports() -> None:
    """Start the collector again; it skips the objects that exist by now."""
    gc.freeze()
    gc.enable()
    atexit.register(_unfreeze_bindings)


def _unfreeze_bindings() -> None:
    """Let Triton's objects be collected: its bindings report those that outlive them on stderr."""
    if "triton" in sys.modules:  # else the last collection would only take time
        gc.unfreeze()


def freeze_garbage() -> None:
    """Freeze existing objects so that the collector skips them.

    A full collection of a tenth of a second would delay every stream. For quire's own processes only, once ready.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would report objects that outlive their modules
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def collect_garbage() -> None:
    """Collect all garbage, including frozen objects, to free memory."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


def limit_memory(num_bytes: int) -> None:
    """Limit this process's address space to its present size and `num_bytes` more, for good."""
    import resource  # there is none on Windows

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, but free no objects, which takes 0.4 s with torch imported.

    Other threads are waited for, exit handlers run, and the output is written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # the process has one
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter's own flush reports it
    os._exit(code)


def exit_reason(code: int) -> str:
    """Describe how a process ended, given its `Popen` exit code."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


ENDED, STOPPED = "has ended", "is stopped"
_SILENT = {"Z": ENDED, "X": ENDED, "T": STOPPED}  # Linux process states -> description


def why_silent(pid: int) -> str | None:
    """Return why a process of this host cannot run, as a phrase for people; None: no visible reason."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ENDED if Path("/proc/self/stat").exists() else None
    return _SILENT.get(state)


def read_order() -> str:
    """Wait for a line on the standard input, which is empty from then on; "" if it was closed before."""
    line = os.fsdecode(sys.stdin.buffer.readline()).rstrip("\n")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    return line


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = stream.read(_SIZE.size)
    return stream.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(_SIZE.pack(len(frame)) + frame)
    stream.flush()
