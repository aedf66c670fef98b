# SPDX-License-Identifier: Apache-2.0
"""Streams from cores to consumers on the event loop.

`OutputStream` holds at most one output: deltas that are not fetched in time are merged, cumulative outputs replace
each other, so a slow client costs memory only for its own text. Outputs are offered and fetched in one order: none is
offered before the consumer has processed all that it fetched and waits for more.

`CoreReceivers`: one thread per core waits for messages and touches nothing else. Its end is reported to the loop as
its last message.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.client import CoreClient
from quire.engine.messages import CoreMessage
from quire.errors import EngineDeadError, QuireError
from quire.outputs import RequestOutput

logger = logging.getLogger(__name__)


class CoreReceivers:
    """Receiver threads of one engine, one per core.

    Args:
        clients: by core; the entry of a replaced core is updated by its owner.
        take_in: called on the loop with a core and its messages.
        lose: called on the loop with a dead core and the error.
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
        """Start the threads unless they run; the running event loop becomes the engine's."""
        if not self._threads:
            for core in range(len(self._clients)):
                self.start(core)

    def start(self, core: int) -> None:
        """Start the thread for this core's client."""
        where = core, self._clients[core], asyncio.get_running_loop()
        thread = threading.Thread(target=self._receive, args=where, name=f"quire-receive-{core}", daemon=True)
        self._threads[core] = thread
        thread.start()

    async def join(self) -> None:
        """Wait for the threads, whose clients have been closed."""
        for thread in list(self._threads.values()):
            await asyncio.to_thread(thread.join)

    def _receive(self, core: int, client: CoreClient, loop: asyncio.AbstractEventLoop) -> None:
        """Thread body: receive from the core, hand messages to the loop, and at last its death."""
        try:
            while messages := client.receive():
                if not _hand_over(loop, self._take_in, core, messages):
                    return
        except QuireError as error:
            _hand_over(loop, self._lose, core, error)
        except Exception:  # bug of an in-process core: the thread must not end silently
            logger.exception("the engine core failed")
            _hand_over(loop, self._lose, core, EngineDeadError("the engine core has failed"))


def _hand_over(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> bool:
    """Call a function on the loop; False if the loop is closed, where no one waits any more."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


# Accepts an output at once, in the event loop's thread, or returns False.
Offer = Callable[[RequestOutput], bool]


class OutputStream:
    """One-place buffer; `put` and `get` are called in the event loop's thread.

    Args:
        offer: gets each output but the last that arrives while `get` waits; `get` returns only what it rejects. This
            saves a task switch per output. An error it raises ends the stream.
    """

    def __init__(self, *, delta: bool, offer: Offer | None = None) -> None:
        self._delta = delta
        self._offer = offer
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()
        self._is_awaited = False  # whether `get` waits, and has nothing to return yet

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the stream."""
        if self._error is not None:
            return
        if isinstance(output, Exception):
            self._error = output
        elif self._is_taken(output):
            return
        elif self._pending is not None and self._delta:
            self._pending.add(output)
        else:
            self._pending = output
        self._fill()

    def _is_taken(self, output: RequestOutput) -> bool:
        if not self._is_awaited or self._offer is None or output.finished:
            return False
        try:
            return self._offer(output)
        except Exception as error:  # raised to the consumer by `get`
            self._error = error
            self._fill()
            return True

    def _fill(self) -> None:
        self._is_awaited = False
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output; raises the error once everything before it was fetched."""
        await self._wait()
        output, self._pending = self._pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._filled.clear()
        return output

    async def _wait(self) -> None:
        self._is_awaited = not self._filled.is_set()
        try:
            await self._filled.wait()
        finally:
            self._is_awaited = False
