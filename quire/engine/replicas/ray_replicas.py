# SPDX-License-Identifier: Apache-2.0
"""Replicas placed by Ray: an actor on each host starts a core and connects it to the server.

Invariant: like any remote replica, one may leave and rejoin at any time. If its actor ends, it is requested again with
a growing delay; before the server is ready the failure is final.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from quire.config import EngineConfig
from quire.config.device import HostShare
from quire.engine.replicas.remote_replicas import RemoteReplicas
from quire.engine.replicas.replica_host import ReplicaAgent
from quire.engine.replicas.replica_wire import facts_of
from quire.engine.supervision import supervision
from quire.errors import QuireError
from quire.executor.ranks.ray_cluster import Lost, RayProcess, StartReplica
from quire.logging_setup import configure_logging
from quire.platforms import Host

logger = logging.getLogger(__name__)


class ReplicaActor:
    """Ray actor class of a replica; arguments are bytes, numbers and text."""

    def run(self, encoded: bytes, replica: int, num_here: int, address: str, port: int) -> str:
        """Serve as one of `num_here` replicas on this host until the server ends.

        Raises:
            QuireError: the server is unreachable or refuses it, or its core cannot start or dies too often.
        """
        config = EngineConfig.decoded(encoded).evolve(
            data_parallel_size_local=1,
            data_parallel_start_rank=replica,
            data_parallel_address=address,
            data_parallel_rpc_port=port,
        )
        configure_logging(config.observability.log_level, config.observability.log_format)
        share = HostShare(num_here, Host().available_bytes() // num_here)
        ReplicaAgent(replace(config, share=share), facts_of(config)).run()
        return "the server has ended"


POLL_S = 0.2
STOP_TIMEOUT_S = 5.0  # Time for replicas to end gracefully.


class RayReplicas:
    """Driver process of Ray, with a thread that receives its messages.

    Args:
        remote: opened here, at this host's address in the cluster unless the user has named another.

    Raises:
        OSError: the machine refuses a process, a socket or a directory.
    """

    def __init__(self, config: EngineConfig, remote: RemoteReplicas) -> None:
        self._parallel, self._remote = config.parallel, remote
        self._supervisor = supervision().make_supervisor(resume=True)
        self._process = RayProcess("quire.engine.replicas.ray_process", with_threads(config))
        self._running: set[int] = set()
        self._due: dict[int, float] = {}  # Replica -> time at which to request it, the first time or again.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="quire-ray-replicas", daemon=True).start()

    def end(self) -> None:
        """Stop requesting replicas; the running ones and Ray's process end soon."""
        self._ended.set()

    def _run(self) -> None:
        """Thread body, until `end`."""
        try:
            place = self._opened()
            while not self._ended.is_set():
                self._request_due(*place)
                for lost in self._process.losses(POLL_S):
                    self._handle_loss(lost)
        except (EOFError, OSError, QuireError) as error:
            problem = str(error) or "Ray's process has ended; see its messages above"
            logger.error("Ray places no more replicas: %s", problem)
            self._remote.give_up(self._parallel.remote_replicas, problem)
        self._ended.wait()
        self._close()

    def _opened(self) -> tuple[str, int]:
        """Open the join port once Ray has room for all replicas."""
        placed, parallel = self._process.placed(), self._parallel
        address = parallel.data_parallel_address or placed.address
        port = self._remote.open((address, parallel.data_parallel_rpc_port or 0))
        for replica, host in zip(parallel.remote_replicas, placed.hosts, strict=True):
            logger.info("replica %d: Ray has room on its host %s", replica, host)
            self._due[replica] = 0.0
        return address, port

    def _request_due(self, address: str, port: int) -> None:
        """Request the replicas that are due."""
        for replica in [replica for replica, at in self._due.items() if at <= time.monotonic()]:
            del self._due[replica]
            self._running.add(replica)
            self._process.send(StartReplica(replica, address, port))

    def _handle_loss(self, lost: Lost) -> None:
        """Handle the end of an actor."""
        self._running.discard(lost.number)
        self._remote.give_up([lost.number], f"Ray cannot start it: {lost.said}")
        no_requests = frozenset[str]()  # no request is blamed here; the engine assigns the blame
        delay_s = self._supervisor.died(lost.number, no_requests, no_requests).restart_in_s
        if delay_s is None:
            logger.error("replica %d: %s; no replacement is requested from Ray", lost.number, lost.said)
            return
        logger.error(
            "replica %d: %s; a replacement is requested from Ray in %g s", lost.number, lost.said, delay_s
        )
        self._due[lost.number] = time.monotonic() + delay_s

    def _close(self) -> None:
        """Collect the ends of stopping replicas, and end the rest."""
        try:
            for _ in range(int(STOP_TIMEOUT_S / POLL_S)):
                if not self._running:
                    break
                self._running -= {lost.number for lost in self._process.losses(POLL_S)}
        except (EOFError, QuireError) as error:
            logger.info("Ray's process has ended before: %s", error)
        self._process.close()


def with_threads(config: EngineConfig, host: Host | None = None) -> EngineConfig:
    """Set the threads per rank of a remote replica, for which Ray reserves as many CPUs.

    By default a replica needs a host like this one.
    """
    if config.device.cpu_threads:
        return config
    num_threads = (host or Host()).num_threads()[0]
    return config.evolve(cpu_threads=max(num_threads // config.parallel.num_ranks, 1))
