"""Replicas that Ray brings to a server: it finds hosts with room, and an actor on each is what starts a core there.

Invariant: as any guest, a replica may go and come back at any time. One whose actor has ended, with or without its
host, is asked for again, after some seconds more each time; before the server is ready that is the end of it.
"""

from __future__ import annotations

import logging
import threading
import time

from quire.config import EngineConfig
from quire.engine.guests import Guests
from quire.engine.supervisor import Supervisor
from quire.errors import QuireError
from quire.executor.ray_messages import Bring, Lost
from quire.executor.ray_process import RayProcess
from quire.platforms import Host

logger = logging.getLogger(__name__)

LISTEN_S = 0.2
LEAVE_S = 5.0
"""How long replicas may take to end in their own way."""


class RayGuests:
    """Has a process of its own for Ray, and a thread that hears it.

    Args:
        guests: which it opens, at this host's address in the cluster unless the user has named another.

    Raises:
        OSError: the machine refuses a process, a socket or a directory.
    """

    def __init__(self, config: EngineConfig, guests: Guests) -> None:
        self._parallel, self._guests = config.parallel, guests
        self._supervisor = Supervisor(resume=True)
        self._process = RayProcess("quire.engine.ray_replicas", with_threads(config))
        self._running: set[int] = set()
        self._due: dict[int, float] = {}
        """When to ask for a replica, the first time or again."""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="quire-ray-guests", daemon=True).start()

    def end(self) -> None:
        """Nothing is asked for any more; what there is ends soon, and Ray's process with it."""
        self._ended.set()

    def _run(self) -> None:
        """Runs in a thread, until `end`."""
        try:
            place = self._opened()
            while not self._ended.is_set():
                self._ask(*place)
                for lost in self._process.losses(LISTEN_S):
                    self._bear(lost)
        except (EOFError, OSError, QuireError) as error:
            problem = str(error) or "Ray's process has ended; it says why above"
            logger.error("Ray brings no replicas any more: %s", problem)
            self._guests.give_up(self._parallel.guests, problem)
        self._ended.wait()
        self._close()

    def _opened(self) -> tuple[str, int]:
        """Where replicas join, once Ray has room for all."""
        placed, asked = self._process.placed(), self._parallel
        address = asked.data_parallel_address or placed.address
        port = self._guests.open((address, asked.data_parallel_rpc_port or 0))
        for replica, host in zip(asked.guests, placed.hosts, strict=True):
            logger.info("replica %d: Ray has room on its host %s", replica, host)
            self._due[replica] = 0.0
        return address, port

    def _ask(self, address: str, port: int) -> None:
        """For those whose time has come."""
        for replica in [replica for replica, at in self._due.items() if at <= time.monotonic()]:
            del self._due[replica]
            self._running.add(replica)
            self._process.tell(Bring(replica, address, port))

    def _bear(self, lost: Lost) -> None:
        """An actor has ended."""
        self._running.discard(lost.number)
        self._guests.give_up([lost.number], f"Ray cannot start it: {lost.said}")
        nobody = frozenset[str]()  # is to blame: the engine knows whose requests these were
        delay_s = self._supervisor.died(lost.number, nobody, nobody).restart_in_s
        if delay_s is None:
            logger.error("replica %d: %s; Ray is not asked for another", lost.number, lost.said)
            return
        logger.error("replica %d: %s; Ray is asked for another in %g s", lost.number, lost.said, delay_s)
        self._due[lost.number] = time.monotonic() + delay_s

    def _close(self) -> None:
        """Have replicas that have heard of the end say that they have ended, and end what is left."""
        try:
            for _ in range(int(LEAVE_S / LISTEN_S)):
                if not self._running:
                    break
                self._running -= {lost.number for lost in self._process.losses(LISTEN_S)}
        except (EOFError, QuireError) as error:
            logger.info("Ray's process has ended before: %s", error)
        self._process.close()


def with_threads(config: EngineConfig, host: Host | None = None) -> EngineConfig:
    """Of a replica on another host each rank has so many threads, as Ray is to keep as many CPUs for it.

    If nobody has said how many, a replica takes a host like this one.
    """
    if config.device.cpu_threads:
        return config
    num_threads = (host or Host()).num_threads()[0]
    return config.evolve(cpu_threads=max(num_threads // config.parallel.num_ranks, 1))
