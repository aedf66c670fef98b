# SPDX-License-Identifier: Apache-2.0
"""Ownership and replacement of an asynchronous engine's cores, and clients of cores that another process owns.

Invariant: a core is replaced by its owner. Each front end decides which of its own requests fail. `AttachedClient`
neither starts nor ends its core; the owner reports its death (`leave`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.client import (
    PROGRESS,
    CoreAddress,
    CoreClient,
    ProcessClient,
    RemoteClient,
    make_clients,
    startup_errors,
)
from quire.engine.core_progress import ProgressFile
from quire.engine.file_states import check_files, states_of
from quire.engine.messages import Attach, CoreMessage, CoreRequest
from quire.engine.replicas.configs import replica_configs, with_meeting_directory
from quire.engine.replicas.ray_replicas import RayReplicas
from quire.engine.replicas.remote_replicas import JOIN_S, RemoteReplicaClient, RemoteReplicas
from quire.engine.supervision import Verdict, supervision
from quire.errors import EngineDeadError, ModelLoadError, QuireError, StartupError


class AttachedClient(RemoteClient):
    """Client of a core that another front end started.

    Raises:
        OSError, ZMQError: that core is gone already.
    """

    def __init__(self, config: EngineConfig, address: CoreAddress, front_end: int) -> None:
        self._address = address
        self._front_end = front_end
        self._left = threading.Event()
        super().__init__(config, Path(address.directory), front_end)

    @property
    def stalls(self) -> bool:
        return self._left.is_set() or super().stalls

    def leave(self) -> None:
        """Mark the core as gone; `receive` reports it after the pending messages."""
        self._left.set()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._release()

    def _open_progress(self, config: EngineConfig) -> ProgressFile:
        return ProgressFile(self._directory / PROGRESS)

    def _connect_core(self, config: EngineConfig) -> int:
        self.send(Attach(self._front_end))
        return self._address.pid

    def _is_gone(self) -> bool:
        return self._left.is_set()

    def _why_gone(self) -> str:
        return "its owner lost it"

    def _on_hang(self, silent_s: float) -> None:
        """No action; the owner detects the hang."""


class PendingCoreClient(CoreClient):
    """Placeholder for a core that is still to come: `receive` fails at once, so a replacement is awaited."""

    def send(self, message: CoreRequest) -> None:
        """Drop the message; unfinished work is sent to the next core."""

    def receive(self) -> list[CoreMessage]:
        raise EngineDeadError("there is no engine core yet")

    def close(self) -> None:
        pass


logger = logging.getLogger(__name__)

InFlightIds = Mapping[str, Sequence[str]]  # Request name -> core ids of its sequences.


class CoreWatcher(Protocol):
    """Observer of cores owned by another front end."""

    def core_started(self, core: int, address: CoreAddress) -> None: ...

    def core_lost(self, core: int) -> None: ...


class Cores(ABC):
    """Cores of one engine.

    Attributes:
        config: of the engine, with every automatic value resolved.
        clients: by core index.
        front_end: number of this engine among the cores' front ends.
    """

    config: EngineConfig
    clients: list[CoreClient]
    front_end: int = 0

    @abstractmethod
    def lost(
        self, core: int, in_flight: InFlightIds, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        """Handle a dead core; `elsewhere` are requests on other cores, `was_ready` whether the engine was ready before.

        Raises:
            QuireError: it is not replaced.
        """

    @abstractmethod
    async def replace(self, core: int, delay_s: float) -> bool:
        """Replace a lost core's client after `delay_s` seconds; False: the engine has ended.

        Raises:
            QuireError, OSError: the new core cannot be started.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop replacing cores."""

    @abstractmethod
    def watch(self, watcher: CoreWatcher) -> None:
        """Report the cores and their replacements to a watcher."""

    @abstractmethod
    def use_weights(self, model_dir: str) -> None:
        """Start replacements with the weights of this directory."""


def requests_in_work(client: CoreClient, in_flight: InFlightIds) -> set[str]:
    """Return the names of these requests that the core was working on."""
    in_work = client.in_work(core_id for core_ids in in_flight.values() for core_id in core_ids)
    return {name for name, core_ids in in_flight.items() if in_work.intersection(core_ids)}


class OwnCores(Cores):
    """Cores that the engine starts, and restarts when their process dies."""

    def __init__(self, config: EngineConfig, *, in_process: bool) -> None:
        self.config = config
        self._configs = replica_configs(config, in_process=in_process)
        self._watcher: CoreWatcher | None = None
        self._supervisor = supervision().make_supervisor(resume=config.supervision.on_core_death == "resume")
        self._stopped = asyncio.Event()
        self._remote = RemoteReplicas(config) if config.parallel.remote_replicas else None
        self._ray: RayReplicas | None = None
        if self._remote is not None:
            self._accept_remote(self._remote)
        self._was_ready = False
        try:
            # They load in the background.
            self.clients = [*make_clients(self._configs, in_process=in_process), *self._remote_clients()]
        except BaseException:
            self.stop()
            raise
        self._met_in = [config.meeting for config in self._configs]

    def lost(
        self, core: int, in_flight: InFlightIds, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        client = self.clients[core]
        self._was_ready = was_ready
        if isinstance(client, RemoteReplicaClient) and not isinstance(error, StartupError):
            logger.error(
                "%s; %d requests resume on another core, or on the restarted one", error, len(in_flight)
            )
            return self._supervisor.left(in_flight.keys(), requests_in_work(client, in_flight), elsewhere)
        cannot_start = isinstance(error, StartupError) and not was_ready
        if cannot_start and (which := self._which(core)):
            raise StartupError(f"{which}{error}")
        has_remote_ranks = (
            self.config.parallel.nnodes > 1
        )  # lost with the core, and not restartable from here
        if cannot_start or has_remote_ranks or not isinstance(client, ProcessClient):
            raise error
        self._check_files(core, error)
        verdict = self._supervisor.died(
            core, in_flight.keys(), requests_in_work(client, in_flight), elsewhere
        )
        if verdict.restart_in_s is None:
            raise EngineDeadError(f"{self._which(core)}{error}; {verdict.reason}")
        num_left, delay_s = len(in_flight) - len(verdict.failed), verdict.restart_in_s
        message = "%s%s; a new one starts in %g s, %d requests resume"
        logger.error(message, self._which(core), error, delay_s, num_left)
        if self._watcher is not None:
            self._watcher.core_lost(core)
        self._restart_expert_group(core)
        return verdict

    def _check_files(self, core: int, error: QuireError) -> None:
        """Raise EngineDeadError if the model's files changed, so that a new core would load another model."""
        try:
            check_files(self._configs[core])
        except (ModelLoadError, OSError) as change:
            raise EngineDeadError(f"{self._which(core)}{error}; it is not replaced: {change}") from None

    def _restart_expert_group(self, core: int) -> None:
        """Restart all replicas that share experts with a lost one, in a new meeting directory."""
        if not self.config.parallel.shares_experts or self._met_in[core] != self._configs[core].meeting:
            return  # stopped because of an earlier loss
        meeting = with_meeting_directory(self._configs[core]).meeting
        self._configs = [replace(config, meeting=meeting) for config in self._configs]
        for other, client in enumerate(self.clients):
            if other != core and isinstance(client, ProcessClient):
                logger.error("%sstopped, since it shares experts with the lost replica", self._which(other))
                client.kill()
        private_directories.remove(Path(self._met_in[core]))

    async def replace(self, core: int, delay_s: float) -> bool:
        await asyncio.to_thread(self.clients[core].close)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopped.wait()
        if self._stopped.is_set():
            return False
        if self._remote is not None and core >= len(self._configs):
            patience_s = math.inf if self._was_ready else JOIN_S
            self.clients[core] = self._remote.client(self._number(core), patience_s)
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
            await asyncio.to_thread(client.close)  # its peers have been lost meanwhile

    def stop(self) -> None:
        self._stopped.set()
        if self._remote is not None:
            self._remote.close()
        if self._ray is not None:
            self._ray.end()

    def _accept_remote(self, remote: RemoteReplicas) -> None:
        """Accept replicas that join from other hosts, or have Ray start them."""
        if self.config.parallel.data_parallel_backend == "mp":
            remote.open(self.config.parallel.join_place)
            return
        with startup_errors():
            self._ray = RayReplicas(self.config, remote)

    def _remote_clients(self) -> list[CoreClient]:
        return (
            []
            if self._remote is None
            else [self._remote.client(number) for number in self.config.parallel.remote_replicas]
        )

    def use_weights(self, model_dir: str) -> None:
        changed = [config.with_weights(model_dir) for config in self._configs]
        self._configs = [replace(config, files=states_of(config)) for config in changed]

    def _number(self, core: int) -> int:
        return self.config.parallel.first_replica + core

    def _which(self, core: int) -> str:
        """Return a prefix for messages about a core, if there are several."""
        return f"replica {self._number(core)}: " if len(self.clients) > 1 else ""

    def watch(self, watcher: CoreWatcher) -> None:
        self._watcher = watcher
        for core, client in enumerate(self.clients):
            assert isinstance(client, ProcessClient), "an in-process core has no other front end"
            watcher.core_started(core, client.address)


class BorrowedCores(Cores):
    """Cores of another process, which reports their addresses and deaths.

    Args:
        config: as resolved by the owner.
        front_end: number of this front end among the cores' front ends; not 0, and never reused.
    """

    def __init__(self, config: EngineConfig, front_end: int) -> None:
        self.config = config
        self.front_end = front_end
        num_cores = config.parallel.num_replicas
        self.clients = [PendingCoreClient() for _ in range(num_cores)]
        self._supervisor = supervision().make_supervisor(resume=config.supervision.on_core_death == "resume")
        self._addresses: list[CoreAddress | None] = [None] * num_cores
        self._stopped = False
        self._changed = [asyncio.Event() for _ in range(num_cores)]

    def core_started(self, core: int, address: CoreAddress) -> None:
        self._addresses[core] = address
        self._changed[core].set()

    def core_lost(self, core: int) -> None:
        """Record that a core is gone and may be replaced."""
        self._addresses[core] = None
        client = self.clients[core]
        if isinstance(client, AttachedClient):
            client.leave()

    def lost(
        self, core: int, in_flight: InFlightIds, elsewhere: Set[str], error: QuireError, *, was_ready: bool
    ) -> Verdict:
        in_work = requests_in_work(self.clients[core], in_flight)
        return self._supervisor.left(in_flight.keys(), in_work, elsewhere)

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
        raise AssertionError("borrowed cores cannot be watched")

    def use_weights(self, model_dir: str) -> None:
        raise AssertionError("the owner of the cores replaces their weights")

    def _attached(self, address: CoreAddress) -> AttachedClient | None:
        """Return a client; None if that core is gone already, which its owner will report."""
        try:
            return AttachedClient(self.config, address, self.front_end)
        except (OSError, zmq.ZMQError) as error:
            logger.info("the engine core cannot be reached (%s); waiting for another", error)
            return None
