# SPDX-License-Identifier: Apache-2.0
"""A real `quire serve` in a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

START_TIMEOUT_S = 120.0
CORE = "quire.engine.core_process"
"""The module that is the engine core, as its command line has it; a server may have other children."""
HELPER = "quire.structured_output.check_process"
QUIRE = (sys.executable, "-m", "quire.entrypoints.cli.main")
MARK = "TEST_THAT_BEGAN_IT"
"""A variable of the environment, by which programs that are left are found, whoever their parent is by then."""
ADMIN = {"authorization": "Bearer admin"}
"""Of any server here that is not told another admin key."""
HEALTHY_WITHIN_S = 300.0
"""Time in which a core that the test has killed comes back."""
SETTLED_WITHIN_S = 60.0
ENDED_WITHIN_S = 60.0
_numbers = itertools.count()


def command_of(pid: int) -> list[str]:
    """The words of a process's command; none of one that is gone, or is no program yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is waited for by nobody."""
    try:
        return _status_of(pid)[0] in "ZX"
    except OSError:
        return True


def _status_of(pid: int) -> list[str]:
    """Its state, its parent, and what else stands behind its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def running(mark: str) -> dict[int, list[str]]:
    """Process id -> command of the programs of ours that carry this mark, but for helpers that have whom they help."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, list[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            is_marked = wanted in (process / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            continue
        command = command_of(pid)
        if is_marked and any(map(_is_ours, command)) and not has_ended(pid) and not _helps(pid, command):
            found[pid] = command
    return found


def _helps(pid: int, command: list[str]) -> bool:
    """Whether it checks constraints of an engine of this process, which may be that of several tests."""
    try:
        parent = int(_status_of(pid)[1])
    except OSError:
        return True  # it has ended
    return HELPER in command and (parent == os.getpid() or HELPER in command_of(parent))


def _is_ours(word: str) -> bool:
    return word.startswith("quire.") or Path(word).name == "quire"


def check_programs(mark: str) -> None:
    """Assert that no program of ours with this mark runs for long; one that does is ended."""
    try:
        wait_until(lambda: not running(mark), ENDED_WITHIN_S, lambda: f"programs are left: {running(mark)}")
    finally:
        for pid in running(mark):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Any, within_s: float, message: Any) -> None:
    """Assert that a condition becomes true in time; the message may be a function, which is called at the end."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(message() if callable(message) else message)
        time.sleep(0.05)


_PORTS = range(10_000, 32_000)
"""Below the ports that systems give to outgoing connections, which could take a free one before a server does."""
_PORTS_EACH = 100
_next_port = itertools.count()


def free_port(number: int = 1) -> int:
    """Return the first of so many free ports in a row; other test processes are given other ports."""
    part = _PORTS[os.getpid() * _PORTS_EACH % len(_PORTS) :][:_PORTS_EACH]
    while True:
        first = part[next(_next_port) * number % (len(part) - number + 1)]
        if all(_is_free(first + offset) for offset in range(number)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and not waited for; each is the child of one of its threads."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            pids += map(int, file.read_text().split())
    return pids


class Server:
    """Starts serving on a free port; `wait_ready` blocks until `/health` says 200.

    What it writes goes to `log`, or, of both streams, that for people to `words`. Its temporary folder is its own,
    unless the environment names one.

    Args:
        sh: a line of shell that runs the command as "$@", for limits and redirections.
    """

    begun: ClassVar[list[Server]] = []
    """Those that nobody has seen the end of."""

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
        self.is_used = False
        self._mark = f"{os.getpid()}-server-{next(_numbers)}"
        self._own_folder = None if "TMPDIR" in environment else tempfile.mkdtemp(prefix="of-server-")
        self._folder = Path(self._own_folder or environment["TMPDIR"])
        ours = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._folder), "QUIRE_ADMIN_API_KEY": "admin"}
        command = [*quire, "serve", *args, "--port", str(self.port)]
        if sh:
            command = ["sh", "-c", sh, "sh", *command]
        with log.open("w") as sink, (words or Path(os.devnull)).open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=sink if words is None else out,
                stderr=sink,
                env={**os.environ, **ours, **environment, MARK: self._mark},
            )
        Server.begun.append(self)

    @classmethod
    def look_at_all(cls) -> None:
        """Assert that those that run, and were used since the last look, are at rest, and that nothing is left of those
        that have ended."""
        for server in cls.begun[:]:
            if server.is_used and not server.has_ended():
                server.check_rest()
            if server.has_ended():
                cls.begun.remove(server)
                server.check_nothing_is_left()

    @property
    def url(self) -> str:
        self.is_used = True
        return f"http://127.0.0.1:{self.port}"

    def has_ended(self) -> bool:
        """Whether all of its process is gone."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        return self.log.read_text()[-5000:]

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.health() != 200:
            assert not self.has_ended(), f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log.read_text()}"
            time.sleep(0.05)
        return self

    def core_pid(self) -> int | None:
        """Return the process id of the engine core, or None while there is none."""
        pids = self.children(CORE)
        return pids[0] if pids else None

    def children(self, module: str) -> list[int]:
        """Processes that run this module, or one whose name begins so."""
        pids = children_of(self.process.pid)
        return [pid for pid in pids if any(word.startswith(module) for word in command_of(pid))]

    def health(self, path: str = "/health") -> int | None:
        """Status of a probe, None while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def held(self) -> dict[str, float]:
        """Return the resources that requests hold, from the server's integrity check; empty if they hold nothing."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/integrity", headers=ADMIN)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            found = json.load(reply)
        counts = {name: found[name] for name in ("num_requests", "num_sequences", "num_generations")}
        for core in found["cores"]:
            for name in ("num_running", "num_waiting", "kv_cache_usage", "host_cache_usage"):
                counts[name] = counts.get(name, 0) + core[name]
        return {name: count for name, count in counts.items() if count}

    def check_rest(self) -> None:
        """Assert that it is healthy, that the core's books balance, and that nothing is held of any request.

        One that was about to end, and does so meanwhile, need not be.
        """
        wait_until(lambda: self.has_ended() or self.health() == 200, HEALTHY_WITHIN_S, self.last_words)
        wait_until(
            lambda: self.has_ended() or not self.held(),
            SETTLED_WITHIN_S,
            lambda: f"something is held: {self.held()}",
        )
        self.is_used = False

    def check_nothing_is_left(self) -> None:
        """Assert that of one that has ended, however it came, no program is left and no folder."""
        check_programs(self._mark)
        left: Callable[[], list[Path]] = lambda: list(self._folder.glob("quire-*"))  # noqa: E731
        wait_until(lambda: not left(), ENDED_WITHIN_S, lambda: f"folders are left: {left()}")
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder)

    def stop(self) -> int:
        """SIGTERM, once it is at rest, and the exit code."""
        if not self.has_ended():
            self.check_rest()
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
