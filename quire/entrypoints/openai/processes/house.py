"""`House`: the API processes of a server besides the first, as the first sees them.

Invariant: there is one process per page of the ledger, or one is about to be started, until the house closes; what one
of them had in a core ends with it. They learn of the cores from here, and each goes on with its own requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from quire.engine.ledger import Ledger
from quire.engine.remote import CoreAddress
from quire.engine.sleep import Rest
from quire.entrypoints.openai.api_server import GRACEFUL_SHUTDOWN_S
from quire.entrypoints.openai.exposition import Merged, families_of
from quire.entrypoints.openai.metrics import QUESTION as METRICS
from quire.entrypoints.openai.processes.channel import open_channel
from quire.entrypoints.openai.processes.launch import Member, launch
from quire.entrypoints.openai.processes.messages import (
    Adapters,
    Cancel,
    CoreLost,
    CoreStarted,
    Drain,
    EngineEnded,
    Hello,
    Message,
    Resting,
    Up,
)
from quire.entrypoints.openai.processes.pulse import BEAT_S, Pulse
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError
from quire.lora_request import LoRARequest

logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 5.0, 30.0)
"""How long to wait before a process is started again that died once, twice ... without having lived for STEADY_S."""
STEADY_S = 60.0


class Owner(Protocol):
    """Of the cores: who forgets what another front end has asked for."""

    def forget(self, front_end: int) -> None: ...


class House:
    """Starts the processes, keeps them, and speaks with them.

    Args:
        hello: what every new process is told; its page and number are filled in.
    """

    def __init__(self, state: ServerState, owner: Owner, ledger: Ledger, hello: Hello) -> None:
        self._state = state
        self._owner = owner
        self._ledger = ledger
        self._hello = hello
        self._numbers = itertools.count(1)
        self._members: dict[int, Member] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._cores: dict[int, CoreAddress] = {}
        self._resting = Resting(Rest(), dozes=False)
        self._buried: list[Any] = []
        self._closing = False

    def open(self) -> None:
        """Start the processes."""
        pages = range(1, self._ledger.num_pages)
        self._keepers = [asyncio.create_task(self._keep(page)) for page in pages]

    def rooms(self) -> list[Member]:
        """Who takes connections."""
        return [] if self._closing else [member for member in self._members.values() if member.serves]

    async def ask(self, question: str, *args: Any) -> list[Any]:
        """What every process says, the own first; one that is gone is remembered by what it has measured."""
        members = list(self._members.values())
        own, answers = await asyncio.gather(
            self._state.answer(question, *args), self._ask_others(question, *args)
        )
        if question == METRICS:
            return [own, *(member.metrics for member in members), self._buried]
        return [own, *(answer for answer in answers if answer is not None)]

    async def decide(self, decision: str, *args: Any) -> None:
        await self._state.carry_out(decision, *args)

    async def share_adapters(self, adapters: Mapping[str, LoRARequest]) -> None:
        self._tell_all(Adapters(dict(adapters)))
        await self.num_unfinished()  # who answers this has heard what was said before

    # The cores

    def core_started(self, core: int, address: CoreAddress) -> None:
        self._cores[core] = address
        self._tell_all(CoreStarted(core, address))

    def core_lost(self, core: int) -> None:
        self._cores.pop(core, None)
        self._tell_all(CoreLost(core))

    # Sleep: they are the cores' other front ends

    async def rest(self, rest: Rest, *, dozes: bool) -> None:
        self._resting = Resting(rest, dozes)
        self._tell_all(self._resting)
        await self.num_unfinished()  # who answers this has heard what was said before

    async def abort(self) -> None:
        await self._ask_others("abort", None)

    async def num_unfinished(self) -> int:
        """Who does not answer may have some."""
        return sum(1 if answer is None else answer for answer in await self._ask_others("unfinished"))

    # The end

    def drain(self) -> None:
        """No process is started any more; those that are there finish their work and end."""
        self._closing = True
        self._tell_all(Drain())

    def cancel(self) -> None:
        self._closing = True
        self._tell_all(Cancel())

    def end(self, reason: str) -> None:
        """The engine has ended."""
        self._closing = True
        self._tell_all(EngineEnded(reason))

    async def wait_gone(self) -> None:
        """Until no process is left."""
        while self._members:  # noqa: ASYNC110  (only while the server ends)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Kill what is left, in a while if it was told to end."""
        if self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACEFUL_SHUTDOWN_S):
                    await self.wait_gone()
        self._closing = True
        for member in self._members.values():
            member.process.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for member in list(self._members.values()):
            await self._bury(member)

    # One process

    async def _keep(self, page: int) -> None:
        """Have a process on this page until the house closes."""
        delays = _delays()
        while not self._closing:
            started = time.monotonic()
            how = await self._live(page)
            if time.monotonic() - started > STEADY_S:
                delays = _delays()
            if not self._closing:
                delay_s = next(delays)
                logger.error("API process %d ended (%s); it is started again in %g s", page, how, delay_s)
                await asyncio.sleep(delay_s)

    async def _live(self, page: int) -> str:
        """One process of this page, from its start on; how it ended."""
        try:
            member = await self._start(page)
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        watching = asyncio.create_task(_watch(member))
        try:
            await member.channel.run()
        except Exception:  # a bug of ours, which may cost that process but not the server
            logger.exception("a word of API process %d was not understood", page)
        finally:
            watching.cancel()
        return await self._bury(member)

    async def _start(self, page: int) -> Member:
        front_end = next(self._numbers)
        # Some milliseconds; in a thread, whoever waits for it could be cancelled.
        process, channel_end, door = launch(self._ledger)
        channel = await open_channel(channel_end, self._answer, lambda message: self._take_in(page, message))
        pulse = Pulse(self._ledger, page, process.pid)
        self._members[page] = member = Member(page, front_end, process, pulse, channel, door)
        channel.tell(_for(self._hello, page, front_end))
        for core, address in self._cores.items():
            channel.tell(CoreStarted(core, address))
        channel.tell(self._resting)
        channel.tell(Adapters(dict(self._state.adapters)))
        if self._closing:  # the end has come meanwhile
            channel.tell(Cancel())
        return member

    async def _bury(self, member: Member) -> str:
        """Leave nothing of a process that is gone, but what it has counted."""
        member.is_up = False
        how = await member.end()
        del self._members[member.page]
        self._owner.forget(member.front_end)
        self._ledger.clear(member.page)
        self._buried = families_of(Merged([self._buried, member.metrics]))
        return how

    def _take_in(self, page: int, message: Message) -> None:
        assert isinstance(message, Up)
        self._members[page].is_up = True
        logger.info("API process %d serves, too (pid %d)", page, self._members[page].process.pid)

    async def _answer(self, question: str, *args: Any) -> Any:
        """To another process: what all say, or that it is done."""
        meant = self.decide if question in self._state.decisions else self.ask
        return await meant(question, *args)

    async def _ask_others(self, question: str, *args: Any) -> list[Any]:
        """Their answers, None for each that has none."""
        members = [member for member in self._members.values() if member.serves]
        return await asyncio.gather(*(self._asked(member, question, *args) for member in members))

    async def _asked(self, member: Member, question: str, *args: Any) -> Any:
        """Its answer; None if it has none."""
        try:
            answer = await member.channel.ask(question, *args)
        except QuireError as error:
            logger.warning("API process %d, asked for %r: %s", member.page, question, error)
            return None
        if question == METRICS:
            member.metrics = answer
        return answer

    def _tell_all(self, message: Message) -> None:
        for member in self._members.values():
            member.channel.tell(message)


async def _watch(member: Member) -> None:
    """Kill a process that hangs; its channel and its connections end with it."""
    while not member.pulse.hangs():  # noqa: ASYNC110  (it is looked at)
        await asyncio.sleep(BEAT_S)
    logger.error(
        "API process %d has not gone on for %.0f s and is killed", member.page, member.pulse.silent_s
    )
    member.process.kill()


def _delays() -> Iterator[float]:
    return itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1]))


def _for(hello: Hello, page: int, front_end: int) -> Hello:
    return Hello(page, hello.num_pages, front_end, hello.engine, hello.server, hello.tenants)
