# SPDX-License-Identifier: Apache-2.0
"""Headless host: it starts and restarts replicas for the server of another host.

Invariant: a core works for one server at a time. When the server is gone the core ends, with all its requests, and a
new one waits for the server to return.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import msgspec

from quire.config import EngineConfig
from quire.engine.client import ProcessClient
from quire.engine.file_states import check_files
from quire.engine.messages import CoreRequest, Shutdown
from quire.engine.replicas.configs import replica_configs
from quire.engine.replicas.remote_replicas import JOIN_S
from quire.engine.replicas.replica_wire import (
    Alive,
    BadFrameError,
    ReplicaCoreLost,
    ReplicaHello,
    ReplicaWire,
    arithmetic_of,
    decoded,
    facts_of,
)
from quire.engine.supervision import supervision
from quire.errors import QuireError, StartupError
from quire.joining import connect_to_first_host, introduce

logger = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 1.0


def run_remote_replicas(config: EngineConfig) -> int:
    """Serve with this host's replicas until the server or a signal ends them; returns the exit code.

    Raises:
        QuireError: the server is unreachable or refuses these replicas, or a core cannot start or dies too often.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = facts_of(config)
    agents = [ReplicaAgent(one, facts) for one in replica_configs(config, in_process=False)]
    threads = ThreadPoolExecutor(len(agents), "quire-replica")
    running = [threads.submit(agent.run) for agent in agents]
    try:
        return _first_failure(running)
    except KeyboardInterrupt:
        return 0
    finally:
        for agent in agents:
            agent.stop()
        threads.shutdown()


def _first_failure(running: list[Future[None]]) -> int:
    """Wait until all have ended, or raise the error of the first that fails."""
    left = set(running)
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        for one in ended:
            one.result()
    return 0


class ReplicaAgent:
    """Agent of one replica on this host."""

    def __init__(self, config: EngineConfig, facts: dict[str, bytes]) -> None:
        self._config, self._facts = config, facts
        self._replica = config.parallel.first_replica
        self._supervisor = supervision().make_supervisor(resume=True)
        self._stopped = threading.Event()
        self._relay: ReplicaRelay | None = None

    def run(self) -> None:
        """Run until the server ends."""
        while (wire := self._joined()) is not None:
            self._relay = relay = ReplicaRelay(self._config, wire)
            if self._stopped.is_set():
                relay.stop()
            death = relay.run()
            if relay.is_dismissed:
                logger.info("replica %d: the server has ended", self._replica)
                return
            if death is not None:
                self._handle_death(death)

    def stop(self) -> None:
        """Stop at once; called from another thread."""
        self._stopped.set()
        if self._relay is not None:
            self._relay.stop()

    def _joined(self) -> ReplicaWire | None:
        """Join the server; None: stopped before the server was there."""
        place = self._config.parallel.join_place
        way = connect_to_first_host(place, f"replica {self._replica}", JOIN_S, self._stopped)
        if way is None:
            return None
        hello = ReplicaHello(
            self._replica, time.monotonic(), self._facts, arithmetic=arithmetic_of(self._config)
        )
        wire = ReplicaWire(introduce(way, hello, place))
        logger.info("replica %d has joined the server at %s:%d", self._replica, *place)
        return wire

    def _handle_death(self, death: QuireError) -> None:
        """Wait before the next core is started, or raise the cause of death."""
        no_requests = frozenset[str]()  # no request is blamed here; the server assigns the blame
        delay_s = self._supervisor.died(self._replica, no_requests, no_requests).restart_in_s
        if delay_s is None or isinstance(death, StartupError):
            raise death
        check_files(self._config)
        logger.error("replica %d: %s; a new core starts in %g s", self._replica, death, delay_s)
        self._stopped.wait(delay_s)


class ReplicaRelay:
    """Relay between a local core and the server that uses it, until one of them is gone.

    Attributes:
        is_dismissed: whether the server has sent the final shutdown.
    """

    def __init__(self, config: EngineConfig, wire: ReplicaWire) -> None:
        self._wire = wire
        self._client = ProcessClient(config)
        self._decoder = msgspec.msgpack.Decoder(CoreRequest)
        self.is_dismissed = False
        self._ended = threading.Event()

    def run(self) -> QuireError | None:
        """Relay messages; returns the core's error, or None if the server is gone or this was stopped."""
        threads = [
            threading.Thread(target=work, daemon=True) for work in (self._relay_to_core, self._send_alive)
        ]
        for thread in threads:
            thread.start()
        try:
            return self._relay_to_server()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
            self._wire.release()

    def stop(self) -> None:
        """Stop; may be called from any thread."""
        self._ended.set()
        self._wire.close()
        self._client.close()

    def _relay_to_server(self) -> QuireError | None:
        """Relay the core's messages to the server."""
        try:
            while messages := self._client.receive():
                for message in messages:
                    self._wire.send(message)
        except QuireError as death:
            if self._ended.is_set():
                return None
            self._send_death(death)
            return death
        except (OSError, EOFError):
            logger.warning("the server is gone")
        return None

    def _send_death(self, death: QuireError) -> None:
        try:
            self._wire.send(ReplicaCoreLost(str(death), sorted(self._client.digests_in_work())))
        except (OSError, EOFError):
            logger.warning("the server is gone as well")

    def _relay_to_core(self) -> None:
        """Thread body: relay the server's messages to the core."""
        try:
            while not self.is_dismissed:
                message = decoded(self._decoder, self._wire.receive())
                self.is_dismissed = isinstance(message, Shutdown)
                self._client.send(message)
        except (OSError, EOFError):
            if not self._ended.is_set():
                logger.warning("the server is gone: its requests are dropped")
        except BadFrameError as error:
            logger.error("disconnecting from the server: %s", error)
        self._ended.set()
        self._client.close()

    def _send_alive(self) -> None:
        """Thread body: send a sign of life to the server every second."""
        try:
            while not self._ended.wait(ALIVE_INTERVAL_S):
                self._wire.send(Alive(self._client.stalls))
        except (OSError, EOFError):
            self._ended.set()
