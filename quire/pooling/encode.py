# SPDX-License-Identifier: Apache-2.0
"""Pooling of many prompts by an asynchronous engine.

Invariant: a collector is called in the event loop's thread only; the first error ends it, and later outputs are
dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.async_llm import FrontEndAccess
from quire.errors import QuireError
from quire.inputs import PromptType
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams, TextOptions


async def encode_all(
    access: FrontEndAccess,
    prompts: Sequence[PromptType],
    params: PoolingParams,
    request_ids: Sequence[str],
    options: TextOptions,
    terms: Mapping[str, Any],
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the pooled output of each prompt, in order; see `AsyncLLM.encode_all`.

    Args:
        terms: keywords of `FrontEnd.submit`.
    """
    front_end = access.front_end
    window = 2 * front_end.config.scheduler.max_num_seqs
    collector, names = PoolingCollector(len(prompts)), list[str]()
    with access.admission.reserve(min(len(prompts), window)) as reserved:
        tokenized = [await access.tokenize(prompt, terms["adapter_request"], options) for prompt in prompts]
        access.admission.check_tokens(reserved, sum(len(one.token_ids) for one in tokenized[:window]))
    try:
        while collector.num_missing:
            num_open = collector.num_missing - (len(prompts) - len(names))
            for place in range(len(names), min(len(names) + window - num_open, len(prompts))):
                name, messages = front_end.submit(
                    request_ids[place], tokenized[place], params, collector.sink(place), **terms
                )
                names.append(name)
                access.send(messages)
            access.expire()  # the deadlines may have passed
            await collector.news()
        return collector.all()
    finally:
        for name in names:
            access.send(front_end.release(name))


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
