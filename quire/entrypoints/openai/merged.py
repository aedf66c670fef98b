# SPDX-License-Identifier: Apache-2.0
"""Outputs of several prompts as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.outputs import RequestOutput

Indexed = tuple[int, RequestOutput]  # Prompt index, and an output of that prompt.


async def merged(generators: list[AsyncGenerator[Indexed, None]]) -> AsyncGenerator[Indexed, None]:
    """Yield the outputs of all generators as they come; the first error ends all."""
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue(maxsize=len(generators))
    pumps = [asyncio.create_task(_pump(outputs, queue)) for outputs in generators]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    outputs: AsyncGenerator[Indexed, None], queue: asyncio.Queue[Indexed | BaseException | None]
) -> None:
    try:
        async with aclosing(outputs):
            async for item in outputs:
                await queue.put(item)
    except Exception as error:  # passed to the consumer, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
