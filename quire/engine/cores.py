"""Where an asynchronous engine's cores come from, and what becomes of one that dies.

Invariant: a core is replaced by who owns it. Which requests do not go on, each front end finds out for its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.attached import AttachedClient, NoCore
from quire.engine.client import ProcessClient, make_clients, startup_errors
from quire.engine.core_client import CoreClient
from quire.engine.file_states import check_files
from quire.engine.guests import JOIN_S, GuestClient, Guests
from quire.engine.ray_guests import RayGuests
from quire.engine.remote import CoreAddress
from quire.engine.replicas import configs_of_replicas, with_meeting
from quire.engine.supervisor import MAX_DEATHS, WINDOW_S, Blame, Supervisor, Verdict
from quire.errors import EngineDeadError, ModelLoadError, QuireError, StartupError

logger = logging.getLogger(__name__)

Flights = Mapping[str, Sequence[str]]
"""Name of each request that a core has -> core ids of its sequences."""


class CoreWatcher(Protocol):
    """Somebody else who has to do with cores that another owns."""

    def core_started(self, core: int, address: CoreAddress) -> None: ...

    def core_lost(self, core: int) -> None: ...


class Cores(ABC):
    """The cores of one engine.

    Attributes:
        config: of the engine, with every automatic value settled.
        clients: of the cores, by their index.
        front_end: which of the cores' front ends the engine has.
    """

    config: EngineConfig
    clients: list[CoreClient]
    front_end: int = 0

    @abstractmethod
    def lost(
        self, core: int, flights: Flights, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        """A core is dead, for this reason; the engine was ready once, or not. Other cores have requests `elsewhere`.

        Raises:
            QuireError: there will be no other.
        """

    @abstractmethod
    async def replace(self, core: int, delay_s: float) -> bool:
        """Put another client into the place of a lost one's, after so many seconds; False: the engine has ended.

        Raises:
            QuireError, OSError: the new core cannot be started.
        """

    @abstractmethod
    def stop(self) -> None:
        """Nothing is replaced any more."""

    @abstractmethod
    def watch(self, watcher: CoreWatcher) -> None:
        """Tell somebody of the cores and of those that take their places."""


def names_in_work(client: CoreClient, flights: Flights) -> set[str]:
    """Which of these requests the core was working on."""
    in_work = client.in_work(core_id for core_ids in flights.values() for core_id in core_ids)
    return {name for name, core_ids in flights.items() if in_work.intersection(core_ids)}


class OwnCores(Cores):
    """Cores that the engine starts, and starts again when they die in a process of their own."""

    def __init__(self, config: EngineConfig, *, in_process: bool) -> None:
        self.config = config
        self._configs = configs_of_replicas(config, in_process=in_process)
        self._watcher: CoreWatcher | None = None
        self._supervisor = Supervisor(resume=config.supervision.on_core_death == "resume")
        self._stopped = asyncio.Event()
        self._guests = Guests(config) if config.parallel.guests else None
        self._ray: RayGuests | None = None
        if self._guests is not None:
            self._let_in(self._guests)
        self._was_ready = False
        try:
            # They load while this goes on.
            self.clients = [*make_clients(self._configs, in_process=in_process), *self._guest_clients()]
        except BaseException:
            self.stop()
            raise
        self._met_in = [config.meeting for config in self._configs]

    def lost(
        self, core: int, flights: Flights, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        client = self.clients[core]
        self._was_ready = was_ready
        if isinstance(client, GuestClient) and not isinstance(error, StartupError):
            logger.error("%s; %d requests go on elsewhere, or when it is back", error, len(flights))
            return self._supervisor.left(flights.keys(), names_in_work(client, flights), elsewhere)
        cannot_start = isinstance(error, StartupError) and not was_ready
        if cannot_start and (which := self._which(core)):
            raise StartupError(f"{which}{error}")
        has_guests = (
            self.config.parallel.nnodes > 1
        )  # which are gone with the core, and nobody here can bring back
        if cannot_start or has_guests or not isinstance(client, ProcessClient):
            raise error
        self._check_files(core, error)
        verdict = self._supervisor.died(core, flights.keys(), names_in_work(client, flights), elsewhere)
        if verdict.restart_in_s is None:
            which = f"it was the {MAX_DEATHS + 1}th death in {WINDOW_S / 60:g} minutes"
            raise EngineDeadError(f"{self._which(core)}{error}; {which}")
        num_left, delay_s = len(flights) - len(verdict.failed), verdict.restart_in_s
        message = "%s%s; a new one starts in %g s, %d requests go on"
        logger.error(message, self._which(core), error, delay_s, num_left)
        if self._watcher is not None:
            self._watcher.core_lost(core)
        self._end_those_who_share_with(core)
        return verdict

    def _check_files(self, core: int, error: QuireError) -> None:
        """Raise EngineDeadError if a new core would compute another model than the one that died."""
        try:
            check_files(self._configs[core])
        except (ModelLoadError, OSError) as change:
            raise EngineDeadError(f"{self._which(core)}{error}; it is not replaced: {change}") from None

    def _end_those_who_share_with(self, core: int) -> None:
        """Replicas that share experts do not go on without one of them: all begin anew, and meet elsewhere."""
        if not self.config.parallel.shares_experts or self._met_in[core] != self._configs[core].meeting:
            return  # it ended with one that was lost before
        meeting = with_meeting(self._configs[core]).meeting
        self._configs = [replace(config, meeting=meeting) for config in self._configs]
        for other, client in enumerate(self.clients):
            if other != core and isinstance(client, ProcessClient):
                logger.error("%sends, since it shares experts with the one that is lost", self._which(other))
                client.kill()
        private_directories.remove(Path(self._met_in[core]))

    async def replace(self, core: int, delay_s: float) -> bool:
        await asyncio.to_thread(self.clients[core].close)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopped.wait()
        if self._stopped.is_set():
            return False
        if self._guests is not None and core >= len(self._configs):
            patience_s = math.inf if self._was_ready else JOIN_S
            self.clients[core] = self._guests.client(self._number(core), patience_s)
            return True
        self.clients[core] = client = await self._started(core)
        if self._watcher is not None and not self._stopped.is_set():
            self._watcher.core_started(core, client.address)
        return True

    async def _started(self, core: int) -> ProcessClient:
        while True:
            config = self._configs[core]
            client = await asyncio.to_thread(ProcessClient, config)
            if config is self._configs[core]:
                self._met_in[core] = config.meeting
                return client
            await asyncio.to_thread(client.close)  # those whom it would meet have been lost meanwhile

    def stop(self) -> None:
        self._stopped.set()
        if self._guests is not None:
            self._guests.close()
        if self._ray is not None:
            self._ray.end()

    def _let_in(self, guests: Guests) -> None:
        """Replicas that others start, or that are to be started by others."""
        if self.config.parallel.data_parallel_backend == "mp":
            guests.open(self.config.parallel.join_place)
            return
        with startup_errors():
            self._ray = RayGuests(self.config, guests)

    def _guest_clients(self) -> list[CoreClient]:
        return (
            []
            if self._guests is None
            else [self._guests.client(number) for number in self.config.parallel.guests]
        )

    def _number(self, core: int) -> int:
        return self.config.parallel.first_replica + core

    def _which(self, core: int) -> str:
        """In front of a message about a core, where there are several."""
        return f"replica {self._number(core)}: " if len(self.clients) > 1 else ""

    def watch(self, watcher: CoreWatcher) -> None:
        self._watcher = watcher
        for core, client in enumerate(self.clients):
            assert isinstance(client, ProcessClient), "a core of this process has no other front end"
            watcher.core_started(core, client.address)


class BorrowedCores(Cores):
    """The cores of another process, which says where they are and that one is gone.

    Args:
        config: as its owner has settled it.
        front_end: which of the cores' front ends this is; not 0, and never one that was before.
    """

    def __init__(self, config: EngineConfig, front_end: int) -> None:
        self.config = config
        self.front_end = front_end
        num_cores = config.parallel.num_replicas
        self.clients = [NoCore() for _ in range(num_cores)]
        self._blame = Blame(resume=config.supervision.on_core_death == "resume")
        self._addresses: list[CoreAddress | None] = [None] * num_cores
        self._stopped = False
        self._changed = [asyncio.Event() for _ in range(num_cores)]

    def core_started(self, core: int, address: CoreAddress) -> None:
        """There is a core."""
        self._addresses[core] = address
        self._changed[core].set()

    def core_lost(self, core: int) -> None:
        """It is gone, and another may come."""
        self._addresses[core] = None
        client = self.clients[core]
        if isinstance(client, AttachedClient):
            client.leave()

    def lost(
        self, core: int, flights: Flights, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        in_work = names_in_work(self.clients[core], flights)
        return Verdict(0.0, self._blame.failed(flights.keys(), in_work, elsewhere))

    async def replace(self, core: int, delay_s: float) -> bool:
        await asyncio.to_thread(self.clients[core].close)
        while not self._stopped:
            address = self._addresses[core]
            if address is not None and (client := self._attached(address)) is not None:
                self.clients[core] = client
                return True
            self._changed[core].clear()
            await self._changed[core].wait()
        return False

    def stop(self) -> None:
        self._stopped = True
        for changed in self._changed:
            changed.set()

    def watch(self, watcher: CoreWatcher) -> None:
        raise AssertionError("borrowed cores are lent to nobody else")

    def _attached(self, address: CoreAddress) -> AttachedClient | None:
        """None if that core is gone already, which we shall hear."""
        try:
            return AttachedClient(self.config, address, self.front_end)
        except (OSError, zmq.ZMQError) as error:
            logger.info("the engine core cannot be reached (%s); another is waited for", error)
            return None
