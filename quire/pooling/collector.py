# SPDX-License-Identifier: Apache-2.0
"""`PoolingCollector`: outputs of the prompts of one pooling call.

Invariant: called in the event loop's thread only; the first error ends it, and later outputs are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.errors import QuireError
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput

Pooled = PoolingRequestOutput[PoolingOutput]


class PoolingCollector:
    """Collector of `count` outputs, by index."""

    def __init__(self, count: int) -> None:
        self._outputs: list[Pooled | None] = [None] * count
        self._num_missing = count
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def num_missing(self) -> int:
        """Outputs that have not arrived."""
        return self._num_missing

    def sink(self, place: int) -> Callable[[Pooled | Exception], None]:
        """Return the function that receives the one output of this index."""

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
        """Wait until outputs have arrived since the last call.

        Raises:
            QuireError: the missing outputs will not come: engine death, a failed prompt or a timeout.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    def all(self) -> list[Pooled]:
        """Return all outputs by index."""
        return [one for one in self._outputs if one is not None]
