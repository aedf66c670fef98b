"""How processes are told about, whoever has started them."""

from __future__ import annotations

import atexit
import gc
import signal
from pathlib import Path

COLLECT_AFTER = 10_000
"""Objects that can be in cycles, made and not yet freed; Python's own number is 700. A request leaves few that only
the collector can free."""

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They reach whole groups of processes (Ctrl-C, a closed terminal, a service manager). Children that end when their
parent tells them to, or is gone, ignore them."""


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
