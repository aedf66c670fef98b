"""`Pumps`: what cores say, handed to the event loop.

Invariant: one thread per core, which waits for messages and touches nothing else; whatever ends it is told to the loop,
as the last it says of that core.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from quire.engine.core_client import CoreClient
from quire.engine.messages import CoreMessage
from quire.errors import EngineDeadError, QuireError

logger = logging.getLogger(__name__)


class Pumps:
    """The threads of one engine.

    Args:
        clients: by core; who replaces a core puts the new client in.
        take_in: called on the loop with a core and its messages.
        lose: called on the loop with a core that is dead, and why.
    """

    def __init__(
        self,
        clients: Sequence[CoreClient],
        take_in: Callable[[int, list[CoreMessage]], None],
        lose: Callable[[int, QuireError], None],
    ) -> None:
        self._clients = clients
        self._take_in = take_in
        self._lose = lose
        self._threads: dict[int, threading.Thread] = {}

    def ensure(self) -> None:
        """Begin, unless that was done: from now on the running event loop is the engine's."""
        if not self._threads:
            for core in range(len(self._clients)):
                self.start(core)

    def start(self, core: int) -> None:
        """Wait for what the client of this core receives."""
        where = core, self._clients[core], asyncio.get_running_loop()
        thread = threading.Thread(target=self._pump, args=where, name=f"quire-pump-{core}", daemon=True)
        self._threads[core] = thread
        thread.start()

    async def join(self) -> None:
        """Wait for the threads, whose clients have been closed."""
        for thread in list(self._threads.values()):
            await asyncio.to_thread(thread.join)

    def _pump(self, core: int, client: CoreClient, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in its own thread: blocks on the core, hands messages to the loop, and last that it is dead."""
        try:
            while messages := client.receive():
                loop.call_soon_threadsafe(self._take_in, core, messages)
        except QuireError as error:
            loop.call_soon_threadsafe(self._lose, core, error)
        except Exception:  # an in-process core's own bug: the thread must not end silently
            logger.exception("the engine core failed")
            loop.call_soon_threadsafe(self._lose, core, EngineDeadError("the engine core has failed"))
