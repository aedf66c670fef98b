"""How an API process besides the first is started, and what the first has of it.

Invariant: nothing is forked or pickled. The process is started by its module's name and has three files open: its ends
of two pairs of sockets, for messages and for connections, and the ledger.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from contextlib import ExitStack
from typing import Any

from quire.engine.ledger import Ledger
from quire.entrypoints.openai.processes.channel import Channel
from quire.entrypoints.openai.processes.pulse import Pulse
from quire.processes import exit_reason, start_python

PROGRAM = "quire.entrypoints.openai.processes.member"
END_S = 1.0
"""How long a process that has closed its sockets may take to be gone."""


class Member:
    """One of the processes: its page, its number as a front end of the core, its pulse, and the ways to it."""

    def __init__(
        self,
        page: int,
        front_end: int,
        process: subprocess.Popen[bytes],
        pulse: Pulse,
        channel: Channel,
        door: socket.socket,
    ) -> None:
        self.page = page
        self.front_end = front_end
        self.process = process
        self.pulse = pulse
        self.channel = channel
        self.door = door
        self.is_up = False
        self.metrics: list[Any] = []

    @property
    def serves(self) -> bool:
        """Whether it takes connections, and questions."""
        return self.is_up and not self.pulse.stalls

    async def end(self) -> str:
        """See to it that it is gone; how it ended."""
        self.door.close()
        try:
            code = await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = await asyncio.to_thread(self.process.wait)
        return exit_reason(code)


def launch(ledger: Ledger) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """A new process, and our ends of the pairs for messages and connections.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """
    with ExitStack() as on_error:
        channel, their_channel = socket.socketpair()
        door, their_door = socket.socketpair()
        on_error.callback(channel.close)
        on_error.callback(door.close)
        door.setblocking(False)
        with their_channel, their_door:
            fds = their_channel.fileno(), their_door.fileno(), ledger.fileno()
            program = ["-m", PROGRAM, str(os.getpid()), *map(str, fds)]
            process = start_python(program, stdin=subprocess.DEVNULL, pass_fds=fds)
        on_error.pop_all()
        return process, channel, door
