"""Starts Python programs as child processes, and describes how processes end."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COLLECT_AFTER = 10_000
"""Objects that can be in cycles, made and not yet freed; Python's own number is 700. A request leaves few that only
the collector can free."""

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They reach whole groups of processes (Ctrl-C, a closed terminal, a service manager). Children that end when their
parent tells them to, or is gone, ignore them."""

PATH_VARIABLES = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"),
    *("TRITON_CACHE_DIR", "QUIRE_CPU_LIBRARY"),
)
"""Variables of the environment with a path, or several, that may be relative to this process's working directory."""


def start_python(
    program: Sequence[str], environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """Start Python with these arguments in `/`, so that it does not depend on a directory that may be deleted.

    Args:
        options: of `Popen`.

    Raises:
        OSError: the machine refuses a process.
    """
    command = [sys.executable, "-P", *program]
    return subprocess.Popen(command, cwd="/", env=child_environment(environment), **options)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child in another directory: with absolute paths, and with this process's imports."""
    with suppress(FileNotFoundError):  # the directory was deleted, and all that is relative to it
        here = os.getcwd()
        relative = {name: environment[name] for name in PATH_VARIABLES if environment.get(name)}
        absolute = {
            name: os.pathsep.join(os.path.join(here, path) for path in paths.split(os.pathsep) if path)
            for name, paths in relative.items()
        }
        own = [os.path.join(here, path) for path in _paths_of_the_program()]
        imports = dict.fromkeys([*own, *absolute.get("PYTHONPATH", "").split(os.pathsep), here])
        paths = [path.rstrip("/") for path in imports if path not in ("", "/")]
        return {**environment, **absolute, "PYTHONPATH": os.pathsep.join(paths)}
    return dict(environment)


def _paths_of_the_program() -> list[str]:
    """Return the paths of `sys.path` before the standard library's; those behind it a child has by itself."""
    library = sysconfig.get_path("stdlib")
    names = {library, str(Path(library).parent / f"python{sys.version_info[0]}{sys.version_info[1]}.zip")}
    first = next((place for place, path in enumerate(sys.path) if path in names), len(sys.path))
    return sys.path[:first]


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without the collector; for processes of our own alone, as all other garbage stays, too."""
    begin_imports()
    try:
        yield
    finally:
        end_imports()


def begin_imports() -> None:
    """Stop the collector, which would walk over all modules again and again and find next to nothing."""
    gc.disable()


def end_imports() -> None:
    """Let the collector go on, without the objects that are there by now."""
    gc.freeze()
    gc.enable()


def settle_garbage() -> None:
    """What has been imported and made by now stays: the collector need not walk over it again and again, which takes
    a tenth of a second that every stream would wait for. For processes of our own alone, once they are ready."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would tell of objects that outlive their modules
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def collect_garbage() -> None:
    """All of it, what has settled too: for when memory is to be given back."""
    has_settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if has_settled:
        gc.freeze()


def exit_reason(code: int) -> str:
    """How a process ended, by the code that `Popen` gives."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


ENDED, STOPPED = "has ended", "is stopped"
_SILENT = {"Z": ENDED, "X": ENDED, "T": STOPPED}
"""What states of a process mean, by Linux's letters."""


def why_silent(pid: int) -> str | None:
    """What keeps a process of this host from doing anything: a phrase for people; None: nothing that can be seen."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ENDED if Path("/proc/self/stat").exists() else None
    return _SILENT.get(state)
