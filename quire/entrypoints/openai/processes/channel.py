"""`Channel`: messages between two API processes, over a pair of connected sockets.

Invariant: messages come in the order in which they were told. The kernel closes the sockets of a process that ends,
however it ends; so the channel's end is the other one's death, and is known at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.entrypoints.openai.processes.messages import Answer, Ask, Message, error_of, refusal_of
from quire.errors import EngineError, QuireError

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
PATIENCE_S = 5.0
"""How long an answer may take where who is asked neither computes nor waits for the core to do so."""


class Channel:
    """One end. `answer` is called for each question of the other end, `take_in` for whatever else it says."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[..., Awaitable[Any]],
        take_in: Callable[[Message], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._take_in = take_in
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def tell(self, message: Message) -> None:
        """Hand a message over, without waiting; what is told to one who is gone is lost."""
        if not self._writer.is_closing():
            frame = self._encoder.encode(message)
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

    async def ask(self, question: str, *args: Any) -> Any:
        """The other end's answer.

        Raises:
            QuireError: with which the other end refuses.
            EngineError: it has no answer, is gone, or takes too long.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.order(question, *args)
        except TimeoutError:
            raise EngineError("another process of the server does not answer") from None

    async def order(self, work: str, *args: Any) -> Any:
        """What the other end says when it is done, which may take long. Raises as `ask` does."""
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self.tell(Ask(number, work, list(args)))
            return _result(await answer)
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Take messages in until the other end is gone."""
        try:
            while True:
                self._dispatch(await self.read())
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self.close()

    async def read(self) -> Message:
        """The next message.

        Raises:
            IncompleteReadError, OSError: the other end is gone.
        """
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        message: Message = self._decoder.decode(await self._reader.readexactly(length))
        return message

    def close(self) -> None:
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(Answer(0, failed=True))
        for task in self._answering:
            task.cancel()

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Ask):
            task = asyncio.create_task(self._reply(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif not isinstance(message, Answer):
            self._take_in(message)
        elif (asked := self._asked.get(message.number)) is not None and not asked.done():
            asked.set_result(message)

    async def _reply(self, ask: Ask) -> None:
        try:
            self.tell(Answer(ask.number, await self._answer(ask.question, *ask.args)))
        except QuireError as error:
            self.tell(Answer(ask.number, refusal=refusal_of(error)))
        except Exception:
            logger.exception("the question %r could not be answered", ask.question)
            self.tell(Answer(ask.number, failed=True))


def _result(answer: Answer) -> Any:
    if answer.failed:
        raise EngineError("another process of the server has no answer")
    if answer.refusal is not None:
        raise error_of(answer.refusal)
    return answer.result


async def open_channel(
    end: socket.socket, answer: Callable[..., Awaitable[Any]], take_in: Callable[[Message], None]
) -> Channel:
    """A channel over this end of a pair."""
    reader, writer = await asyncio.open_unix_connection(sock=end)
    return Channel(reader, writer, answer, take_in)
