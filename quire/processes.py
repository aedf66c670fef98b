"""How child processes are told about, whoever has started them."""

from __future__ import annotations

import signal

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They reach whole groups of processes (Ctrl-C, a closed terminal, a service manager). Children that end when their
parent tells them to, or is gone, ignore them."""


def exit_reason(code: int) -> str:
    """How a process ended, by the code that `Popen` gives."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
