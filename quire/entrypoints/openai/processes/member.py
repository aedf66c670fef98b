"""An API process besides the first: `python -m quire.entrypoints.openai.processes.member PARENT_PID FD FD FD`.

Invariant: it never outlives the first process, whatever it is doing: it ends when the socket does over which that one
speaks to it, and if it cannot, within the two seconds that a core has. The files are that socket, the one over which
connections come, and the ledger. Signals for the whole process group are the first process's business, from before
anything slow is imported.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from quire.engine.parent import Parent

THE_FIRSTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    for number in THE_FIRSTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent, channel, door, ledger = map(int, sys.argv[1:5])
    Parent(parent).watch()

    from quire.entrypoints.openai.api_server import loop_factory
    from quire.entrypoints.openai.processes.membership import serve
    from quire.logging_setup import configure_logging
    from quire.plugins import load_general_plugins

    configure_logging()
    load_general_plugins()
    with (
        socket.socket(fileno=channel) as channel_end,
        socket.socket(fileno=door) as back_door,
        open(ledger, "r+b") as file,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(serve(channel_end, back_door, file))


if __name__ == "__main__":
    sys.exit(main())
