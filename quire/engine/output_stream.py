"""`OutputStream`: one request's outputs on their way to one consumer.

Invariant: holds at most one output: deltas that are not fetched in time are joined, cumulative outputs replace
each other, so a slow client costs memory only for its own text.
"""

from __future__ import annotations

import asyncio

from quire.outputs import RequestOutput


class OutputStream:
    """A one-place buffer; `put` and `get` are called in the event loop's thread."""

    def __init__(self, *, delta: bool) -> None:
        self._delta = delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the stream."""
        if isinstance(output, Exception):
            self._error = output
        elif self._pending is not None and self._delta:
            self._pending.add(output)
        else:
            self._pending = output
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output; raises the error once everything before it was fetched."""
        await self._filled.wait()
        output, self._pending = self._pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._filled.clear()
        return output
