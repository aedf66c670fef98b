# SPDX-License-Identifier: Apache-2.0
"""Entry point of an API worker: `python -m quire.entrypoints.openai.processes.worker_process PARENT_PID FD FD FD`.

Invariant: signals to the process group are the supervisor's; they are ignored before any slow import.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from quire.processes import leave, uncollected

SUPERVISOR_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    for number in SUPERVISOR_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent, channel, connections, counters = map(int, sys.argv[1:5])

    from quire.engine.core_service import ParentProcess

    ParentProcess(parent).watch()

    with uncollected():
        from quire.entrypoints.openai.api_server import loop_factory
        from quire.entrypoints.openai.processes.worker import serve
        from quire.logging_setup import configure_logging
        from quire.plugins import load_general_plugins

    configure_logging()
    load_general_plugins()
    with (
        socket.socket(fileno=channel) as channel_end,
        socket.socket(fileno=connections) as connections_end,
        open(counters, "r+b") as file,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(serve(channel_end, connections_end, file))


if __name__ == "__main__":
    leave(main())
