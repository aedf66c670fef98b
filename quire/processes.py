"""How processes are told about, whoever has started them."""

from __future__ import annotations

import signal
from pathlib import Path

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They reach whole groups of processes (Ctrl-C, a closed terminal, a service manager). Children that end when their
parent tells them to, or is gone, ignore them."""


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
