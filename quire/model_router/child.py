# SPDX-License-Identifier: Apache-2.0
"""One model's server as a child process: its start, its readiness, its log and its end.

Every child is started without a model and then told its flags, at once or, if it was the spare one, later.
Invariant: a child is over when every process of its group has ended, so its memory is back. What it was told (flags,
keys) is in a file of the router's private directory that only this user can read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from quire.logging_setup import StreamWriter
from quire.model_router.child_http import ChildLostError, status_of
from quire.model_router.spare import Spare
from quire.processes import child_environment, exit_reason

logger = logging.getLogger(__name__)

POLL_S = 0.05
GROUP_END_S = 30.0  # Time in which the processes of a killed group must be gone.
LAST_LINES = 20
MAX_LINE_BYTES = 2**16
_PATH = re.compile(r"(?<![\w/])~?/[^\s:;,'\"]+")


class Child(Protocol):
    """Server of one model, as the router uses it."""

    socket: str
    admin_key: str

    async def wait_ready(self) -> None:
        """Wait until it serves; raises ChildLostError if it ends before."""

    async def control(self, path: str) -> bool:
        """POST to an admin route; return whether it succeeded. Raises ChildLostError if the child is gone."""

    def terminate(self, *, at_once: bool = False) -> None:
        """Ask it to finish its requests and end, or to cancel them."""

    def kill(self) -> None:
        """End all of its processes."""

    async def ended(self) -> str:
        """Wait until all of its processes have ended; return why, for people."""


class Starter(Protocol):
    """Starts models' servers, and may keep one ahead that has no model yet."""

    @property
    def has_spare(self) -> bool:
        """True if a server without a model takes memory."""

    async def __call__(self, name: str, flags: Mapping[str, Any]) -> Child:
        """Start the server of a model with these flags, which may be the spare one."""

    def keep_spare(self, is_wanted: bool) -> None:
        """Keep a spare server from now on, or none."""

    async def settle(self) -> None:
        """Wait until a spare server that is not wanted has given its memory back."""

    async def close(self) -> None:
        """End the spare server."""


class ServerStarter:
    """Starts `quire serve` for models.

    Args:
        directory: private directory for sockets and flags.
        prefixes_log: whether each line of a child's log gets the model's name in front.
    """

    def __init__(self, directory: Path, *, prefixes_log: bool) -> None:
        self._directory = directory
        self._prefixes_log = prefixes_log
        self._log = StreamWriter("stderr")
        self._num_started = 0
        self._spare = Spare(self._spawn)

    @property
    def has_spare(self) -> bool:
        return self._spare.is_there

    async def __call__(self, name: str, flags: Mapping[str, Any]) -> Child:
        """Raises OSError if the machine refuses a process."""
        child = await self._spare.take() or await self._spawn()
        try:
            child.serve(flags, f"{name} | " if self._prefixes_log else "")
        except OSError:  # there is no room for its flags
            child.kill()
            raise
        return child

    def keep_spare(self, is_wanted: bool) -> None:
        self._spare.keep(is_wanted)

    async def settle(self) -> None:
        await self._spare.settle()

    async def close(self) -> None:
        await self._spare.close()

    async def _spawn(self) -> ServerChild:
        """Start a server that waits for its flags."""
        self._num_started += 1
        place = self._directory / str(self._num_started)
        socket, config = f"{place}.sock", place.with_suffix(".yaml")
        admin_key = secrets.token_hex(24)
        program = [
            "-P",
            "-m",
            f"{__package__}.child_process",
            str(os.getpid()),
            str(self._directory),
            str(config),
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *program,
            env={**child_environment(os.environ), "QUIRE_ADMIN_API_KEY": admin_key},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,  # the ready message
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # a signal to the terminal's group is the router's
        )
        return ServerChild(process, socket, admin_key, self._log, "spare | " if self._prefixes_log else "")


class ServerChild:
    """Process that is told to be `quire serve` on a Unix socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: str, admin_key: str, log: StreamWriter, prefix: str
    ) -> None:
        self.socket = socket
        self.admin_key = admin_key
        self._process = process
        self._config = Path(socket).with_suffix(".yaml")
        self._log = log
        self._prefix = prefix
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ended = asyncio.create_task(self._watch())

    def serve(self, flags: Mapping[str, Any], prefix: str) -> None:
        """Let it serve by these flags; its log lines begin with `prefix` from now on. Called once."""
        assert self._process.stdin is not None, "it is a pipe"
        self._config.touch(0o600, exist_ok=False)
        self._config.write_text(json.dumps({**flags, "uds": self.socket}), encoding="utf-8")
        self._prefix = prefix
        self._process.stdin.write(b"serve\n")
        self._process.stdin.close()  # a child that has ended meanwhile is reported by `wait_ready`

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait_ready(self) -> None:
        while True:
            with suppress(ChildLostError):  # it does not listen yet, or has ended
                if await status_of(self.socket, "GET", "/health") == 200:
                    return
            if self.has_ended:
                raise ChildLostError(self._reason())
            await asyncio.sleep(POLL_S)

    async def control(self, path: str) -> bool:
        headers = [(b"authorization", f"Bearer {self.admin_key}".encode())]
        return await status_of(self.socket, "POST", path, headers) == 200

    def terminate(self, *, at_once: bool = False) -> None:
        self._signal(signal.SIGQUIT if at_once else signal.SIGTERM)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        return await asyncio.shield(self._ended)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _watch(self) -> str:
        """Pass the log on until the process ends; end what it left behind."""
        reading = asyncio.create_task(self._pass_log_on())
        await self._process.wait()
        self.kill()
        deadline = asyncio.get_running_loop().time() + GROUP_END_S
        while _group_runs(self._process.pid) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        await asyncio.wait({reading}, timeout=GROUP_END_S)
        reading.cancel()
        for path in (Path(self.socket), self._config):
            path.unlink(missing_ok=True)
        return self._reason()

    async def _pass_log_on(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # longer than the limit; its beginning was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace")
            self._lines.append(text.strip())
            self._log.write(self._prefix + text)

    def _reason(self) -> str:
        """Return the sentence in which the server said why it ended, without paths; or how it ended."""
        assert self._process.returncode is not None, "it has ended"
        said = [line for line in map(_message, self._lines) if line.lower().startswith("error: ")]
        if said and self._process.returncode > 0:
            return _PATH.sub("...", said[-1][len("error: ") :])
        if self._process.returncode == 0:
            return "its server ended without an error, as after SIGTERM"
        return exit_reason(self._process.returncode)


def _message(line: str) -> str:
    """Return a log line's text; of a JSON log its message."""
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line).get("message", ""))
    except ValueError:
        return line


def _group_runs(group: int) -> bool:
    """Return whether a process of a group runs; zombies, whose memory is back, do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, of_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(of_group) == group and state not in "ZX":
                return True
    return False
