"""`OutputStream`: one request's outputs on their way to one consumer.

Invariant: holds at most one output: deltas that are not fetched in time are joined, cumulative outputs replace
each other, so a slow client costs memory only for its own text. Outputs are offered and fetched in one order: none is
offered before the consumer has dealt with all that it fetched, and waits for more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.outputs import RequestOutput

Offer = Callable[[RequestOutput], bool]
"""Takes an output at once, in the event loop's thread, or does nothing and returns False."""


class OutputStream:
    """A one-place buffer; `put` and `get` are called in the event loop's thread.

    Args:
        offer: is shown what comes while `get` waits, but for the last output; `get` returns only what it does not
            take. So what can be dealt with at once costs no task switch. An error of it ends the stream.
    """

    def __init__(self, *, delta: bool, offer: Offer | None = None) -> None:
        self._delta = delta
        self._offer = offer
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()
        self._is_awaited = False  # whether `get` waits, and has nothing to return yet

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the stream, behind which nothing comes."""
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
        except Exception as error:  # the consumer's own, who gets it where it waits
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
