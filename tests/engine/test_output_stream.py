# SPDX-License-Identifier: Apache-2.0
"""Outputs reach their one consumer in order, whichever way, and what ends a stream comes last."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.output_stream import OutputStream
from quire.outputs import CompletionOutput, RequestOutput


def output(text: str, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [ord(text)])], finished)


def text_of(one: RequestOutput) -> str:
    return one.outputs[0].text


class Consumer:
    """Reads a stream to its end, and takes what it is offered while it likes to."""

    def __init__(self) -> None:
        self.stream = OutputStream(delta=True, offer=self.offer)
        self.takes = True
        self.taken, self.seen = "", ""
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def offer(self, one: RequestOutput) -> bool:
        if self.takes:
            self.taken += text_of(one)
            self.seen += text_of(one)
        return self.takes

    async def read(self) -> None:
        while True:
            one = await self.stream.get()
            await self.may_go_on.wait()
            self.seen += text_of(one)
            if one.finished:
                return


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


async def test_offer_skips_the_last_output_and_waits_for_a_consumer(consumer: Consumer) -> None:
    consumer.stream.put(output("a"))
    reading = asyncio.create_task(consumer.read())
    consumer.stream.put(output("b"))
    await asyncio.sleep(0)
    consumer.stream.put(output("c"))
    consumer.stream.put(output("d", finished=True))
    await reading
    assert (consumer.taken, consumer.seen) == ("c", "abcd")


async def test_refused_offer_is_fetched_in_order(consumer: Consumer) -> None:
    reading = asyncio.create_task(consumer.read())
    await asyncio.sleep(0)
    consumer.takes = False
    consumer.stream.put(output("a"))
    consumer.takes = True
    consumer.stream.put(output("b"))  # the consumer is about to fetch
    consumer.may_go_on.clear()
    await asyncio.sleep(0)
    consumer.stream.put(output("c"))  # it has fetched, and is not done
    consumer.may_go_on.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.stream.put(output("d"))
    consumer.stream.put(output("e", finished=True))
    await reading
    assert (consumer.taken, consumer.seen) == ("d", "abcde")


async def test_error_while_receiving_ends_the_stream_for_the_consumer() -> None:
    def broken(_: RequestOutput) -> bool:
        raise RuntimeError("of the taker")

    stream = OutputStream(delta=True, offer=broken)
    waiting = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.put(output("a"))
    stream.put(output("b"))  # behind a gap
    for fetched in (waiting, stream.get()):
        with pytest.raises(RuntimeError, match="of the taker"):
            await fetched


async def test_a_consumer_that_was_cancelled_is_offered_nothing(consumer: Consumer) -> None:
    reading = asyncio.create_task(consumer.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    consumer.stream.put(output("a"))
    assert consumer.taken == ""
