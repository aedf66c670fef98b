"""A real `quire serve` in a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

START_TIMEOUT_S = 120.0
CORE = "quire.engine.core_process"
"""The module that is the engine core, as its command line has it; a server may have other children."""
QUIRE = (sys.executable, "-m", "quire.entrypoints.cli.main")


def command_of(pid: int) -> list[str]:
    """The words of a process's command; none of one that is gone, or is no program yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and not waited for; each is the child of one of its threads."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            pids += map(int, file.read_text().split())
    return pids


class Server:
    """Starts serving on a free port; `wait_ready` blocks until `/health` says 200.

    What it writes goes to `log`, or, of both streams, that for people to `words`.

    Args:
        sh: a line of shell that runs the command as "$@", for limits and redirections.
    """

    def __init__(
        self,
        *args: str,
        log: Path,
        words: Path | None = None,
        quire: Sequence[str] = QUIRE,
        sh: str = "",
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [*quire, "serve", *args, "--port", str(self.port)]
        if sh:
            command = ["sh", "-c", sh, "sh", *command]
        with log.open("w") as sink, (words or Path(os.devnull)).open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=sink if words is None else out,
                stderr=sink,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.health() != 200:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log.read_text()}"
            time.sleep(0.05)
        return self

    def core_pid(self) -> int | None:
        """Of the engine core's process, None while there is none."""
        pids = self.children(CORE)
        return pids[0] if pids else None

    def children(self, module: str) -> list[int]:
        """Processes that run this module, or one whose name begins so."""
        pids = children_of(self.process.pid)
        return [pid for pid in pids if any(word.startswith(module) for word in command_of(pid))]

    def health(self, path: str = "/health") -> int | None:
        """Status of a probe, None while nobody listens."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
