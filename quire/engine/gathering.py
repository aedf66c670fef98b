"""`Gathering`: the outputs of many prompts that are pooled for one caller, on their way to it.

Invariant: called in the event loop's thread only; the first error ends it, and what comes later is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.errors import QuireError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput

Pooled = PoolingRequestOutput[PoolingOutput]


class Gathering:
    """Has a place for each of `count` outputs."""

    def __init__(self, count: int) -> None:
        self._outputs: list[Pooled | None] = [None] * count
        self._num_missing = count
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def num_missing(self) -> int:
        """Outputs that have not come."""
        return self._num_missing

    def sink(self, place: int) -> Callable[[Pooled | Exception], None]:
        """Where the output of this place goes, which comes once."""

        def put(output: Pooled | Exception) -> None:
            try:
                self._put(place, output)
            except QuireError as error:
                self._error = self._error or error
            self._news.set()

        return put

    def _put(self, place: int, output: Pooled | Exception) -> None:
        if isinstance(output, Exception):
            self._error = self._error or output
            return
        output.check()
        self._outputs[place] = output
        self._num_missing -= 1

    async def news(self) -> None:
        """Wait until some have come since the last call.

        Raises:
            QuireError: what is missing will not come: the engine died, a prompt failed, its time was over.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    def all(self) -> list[Pooled]:
        """All outputs, in the order of their places."""
        return [one for one in self._outputs if one is not None]
