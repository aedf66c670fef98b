# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisor process and an API worker, over a pair of connected sockets.

Invariant: messages arrive in the order in which they were sent. The kernel closes the sockets of a process that ends,
so the end of a channel is the death of the other process. Messages are msgspec structs in msgpack, never pickle; both
processes are of one installation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.adapters import AdapterRequest
from quire.config import EngineConfig, ServerConfig
from quire.engine.client import CoreAddress
from quire.engine.sleep_state import EngineSleepState
from quire.entrypoints.openai.keys import Tenant
from quire.errors import (
    ConflictError,
    EngineDeadError,
    EngineError,
    NotFoundError,
    QuireError,
    UnavailableError,
    ValidationError,
)

logger = logging.getLogger(__name__)

KINDS: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (
        ValidationError,
        ConflictError,
        NotFoundError,
        UnavailableError,
        EngineError,
        EngineDeadError,
        QuireError,
    )
}
TERMS = ("param", "retry_after")
LENGTH_BYTES = 4
PATIENCE_S = 5.0  # Timeout of a query, whose handler neither computes nor waits for a core.


class WorkerHello(msgspec.Struct, tag="hello", frozen=True):
    """First message to a new worker: its identity and configuration.

    `slot` is its slot of the shared counters, which have `num_pages`, and `front_end` a number not used before.
    `tenants` holds the keys and limits read at server start, even if the key file has changed.
    """

    slot: int
    num_pages: int
    front_end: int
    engine: EngineConfig
    server: ServerConfig
    tenants: dict[str, Tenant]


class CoreStarted(msgspec.Struct, tag="core_started", frozen=True):
    """A core is available at this address."""

    core: int
    address: CoreAddress


class CoreLost(msgspec.Struct, tag="core_lost", frozen=True):
    """A core has ended; another may replace it."""

    core: int


class SleepChanged(msgspec.Struct, tag="resting", frozen=True):
    """Sleep state of the engine; `is_falling_asleep`: it accepts no requests, because it is about to sleep."""

    rest: EngineSleepState
    is_falling_asleep: bool


class ServedAdapters(msgspec.Struct, tag="adapters", frozen=True):
    """Adapters to serve from now on, by name."""

    served: dict[str, AdapterRequest]


class EngineEnded(msgspec.Struct, tag="engine_ended", frozen=True):
    """The engine has stopped for good: end all streams, then exit."""

    reason: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Accept no more requests, finish the running ones, and exit."""


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel all requests and exit."""


class WorkerReady(msgspec.Struct, tag="up", frozen=True):
    """Sent by a new worker that is ready for connections and requests."""


class Query(msgspec.Struct, tag="ask", frozen=True):
    """A query; a `QueryResult` with the same number follows."""

    number: int
    name: str
    args: list[Any]


class RemoteError(msgspec.Struct, frozen=True):
    """Serialized error: name of its class, and its arguments."""

    kind: str
    message: str
    terms: dict[str, Any]


class QueryResult(msgspec.Struct, tag="answer", frozen=True):
    """Result of a query, or its error; `failed`: neither, and the reason is in the other process's log."""

    number: int
    result: Any = None
    refusal: RemoteError | None = None
    failed: bool = False


def serialize_error(error: QuireError) -> RemoteError:
    """Serialize an error as its nearest class in `KINDS`."""
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in KINDS)
    return RemoteError(
        kind, str(error), {name: getattr(error, name) for name in TERMS if hasattr(error, name)}
    )


def deserialize_error(refusal: RemoteError) -> QuireError:
    return KINDS[refusal.kind](refusal.message, **refusal.terms)


Message = (
    WorkerHello
    | CoreStarted
    | CoreLost
    | SleepChanged
    | ServedAdapters
    | EngineEnded
    | Drain
    | Cancel
    | WorkerReady
    | Query
    | QueryResult
)


class Channel:
    """One end of a channel. `answer` handles the other end's queries, `take_in` its other messages."""

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
        self._asked: dict[int, asyncio.Future[QueryResult]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def send(self, message: Message) -> None:
        """Send a message without waiting; messages to a dead process are dropped."""
        if not self._writer.is_closing():
            frame = self._encoder.encode(message)
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

    async def ask(self, query: str, *args: Any) -> Any:
        """Send a query and return its result.

        Raises:
            QuireError: the error that the handler raised.
            EngineError: the other process failed, has ended, or exceeds the timeout.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.execute(query, *args)
        except TimeoutError:
            raise EngineError("another process of the server does not answer") from None

    async def execute(self, work: str, *args: Any) -> Any:
        """Send a command and return its result, without a timeout. Raises as `ask` does."""
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self.send(Query(number, work, list(args)))
            return _result(await answer)
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Receive messages until the other end is closed."""
        try:
            while True:
                self._dispatch(await self.read())
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self.close()

    async def read(self) -> Message:
        """Receive the next message.

        Raises:
            IncompleteReadError, OSError: the other end is closed.
        """
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        message: Message = self._decoder.decode(await self._reader.readexactly(length))
        return message

    def close(self) -> None:
        self._writer.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(QueryResult(0, failed=True))
        for task in self._answering:
            task.cancel()

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Query):
            task = asyncio.create_task(self._reply(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif not isinstance(message, QueryResult):
            self._take_in(message)
        elif (asked := self._asked.get(message.number)) is not None and not asked.done():
            asked.set_result(message)

    async def _reply(self, query: Query) -> None:
        try:
            self.send(QueryResult(query.number, await self._answer(query.name, *query.args)))
        except QuireError as error:
            self.send(QueryResult(query.number, refusal=serialize_error(error)))
        except Exception:
            logger.exception("the query %r failed", query.name)
            self.send(QueryResult(query.number, failed=True))


def _result(answer: QueryResult) -> Any:
    if answer.failed:
        raise EngineError("another process of the server has no answer")
    if answer.refusal is not None:
        raise deserialize_error(answer.refusal)
    return answer.result


async def open_channel(
    end: socket.socket, answer: Callable[..., Awaitable[Any]], take_in: Callable[[Message], None]
) -> Channel:
    """Open a channel over one end of a socket pair."""
    reader, writer = await asyncio.open_unix_connection(sock=end)
    return Channel(reader, writer, answer, take_in)
