"""A host without a server: it starts replicas for the server of another one, and starts them again.

Invariant: a core works for one server at a time. When that is gone the core ends, with all that it was asked for, and
another one waits for the server to come back.
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
from quire.engine.guests import JOIN_S
from quire.engine.messages import CoreRequest, Shutdown
from quire.engine.replica_wire import (
    Alive,
    BadFrameError,
    CoreLost,
    ReplicaHello,
    Wire,
    arithmetic_of,
    decoded,
    facts_of,
)
from quire.engine.replicas import configs_of_replicas
from quire.engine.supervisor import Supervisor
from quire.errors import QuireError, StartupError
from quire.joining import introduced, opened

logger = logging.getLogger(__name__)

BEAT_S = 1.0


def run_guests(config: EngineConfig) -> int:
    """Serve with this host's replicas until the server or a signal ends them; returns the exit code.

    Raises:
        QuireError: the server is not there, or does not want these replicas, or a core cannot start or dies too often.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = facts_of(config)
    guests = [GuestHost(one, facts) for one in configs_of_replicas(config, in_process=False)]
    threads = ThreadPoolExecutor(len(guests), "quire-replica")
    running = [threads.submit(guest.run) for guest in guests]
    try:
        return _first_failure(running)
    except KeyboardInterrupt:
        return 0
    finally:
        for guest in guests:
            guest.stop()
        threads.shutdown()


def _first_failure(running: list[Future[None]]) -> int:
    """Wait until all have ended, or one has failed, whose error this raises."""
    left = set(running)
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        for one in ended:
            one.result()
    return 0


class GuestHost:
    """One replica of this host."""

    def __init__(self, config: EngineConfig, facts: dict[str, bytes]) -> None:
        self._config, self._facts = config, facts
        self._replica = config.parallel.first_replica
        self._supervisor = Supervisor(resume=True)
        self._stopped = threading.Event()
        self._relay: Relay | None = None

    def run(self) -> None:
        """Until the server has no more use for it."""
        while (wire := self._joined()) is not None:
            self._relay = relay = Relay(self._config, wire)
            if self._stopped.is_set():
                relay.end()
            death = relay.run()
            if relay.is_dismissed:
                logger.info("replica %d: the server has ended", self._replica)
                return
            if death is not None:
                self._bear(death)

    def stop(self) -> None:
        """From another thread: end at once."""
        self._stopped.set()
        if self._relay is not None:
            self._relay.end()

    def _joined(self) -> Wire | None:
        """None: this was stopped before the server was there."""
        place = self._config.parallel.join_place
        way = opened(place, f"replica {self._replica}", JOIN_S, self._stopped)
        if way is None:
            return None
        hello = ReplicaHello(
            self._replica, time.monotonic(), self._facts, arithmetic=arithmetic_of(self._config)
        )
        wire = Wire(introduced(way, hello, place))
        logger.info("replica %d has joined the server at %s:%d", self._replica, *place)
        return wire

    def _bear(self, death: QuireError) -> None:
        """Wait before another core is started; raises what the core died of if none is."""
        nobody = frozenset[str]()  # is to blame: the server knows whose requests these were
        delay_s = self._supervisor.died(self._replica, nobody, nobody).restart_in_s
        if delay_s is None or isinstance(death, StartupError):
            raise death
        check_files(self._config)
        logger.error("replica %d: %s; a new core starts in %g s", self._replica, death, delay_s)
        self._stopped.wait(delay_s)


class Relay:
    """Between a core that this starts and the server that has asked for it, until one of them is gone.

    Attributes:
        is_dismissed: whether the server has said that this is the end.
    """

    def __init__(self, config: EngineConfig, wire: Wire) -> None:
        self._wire = wire
        self._client = ProcessClient(config)
        self._decoder = msgspec.msgpack.Decoder(CoreRequest)
        self.is_dismissed = False
        self._ended = threading.Event()

    def run(self) -> QuireError | None:
        """What the core died of; None: the server is gone, or this was ended."""
        threads = [threading.Thread(target=work, daemon=True) for work in (self._down, self._beat)]
        for thread in threads:
            thread.start()
        try:
            return self._up()
        finally:
            self.end()
            for thread in threads:
                thread.join()
            self._wire.release()

    def end(self) -> None:
        """From any thread."""
        self._ended.set()
        self._wire.close()
        self._client.close()

    def _up(self) -> QuireError | None:
        """What the core says goes to the server."""
        try:
            while messages := self._client.receive():
                for message in messages:
                    self._wire.send(message)
        except QuireError as death:
            if self._ended.is_set():
                return None
            self._tell_death(death)
            return death
        except (OSError, EOFError):
            logger.warning("the server is gone")
        return None

    def _tell_death(self, death: QuireError) -> None:
        try:
            self._wire.send(CoreLost(str(death), sorted(self._client.digests_in_work())))
        except (OSError, EOFError):
            logger.warning("the server is gone as well")

    def _down(self) -> None:
        """Runs in a thread: what the server says goes to the core."""
        try:
            while not self.is_dismissed:
                message = decoded(self._decoder, self._wire.receive())
                self.is_dismissed = isinstance(message, Shutdown)
                self._client.send(message)
        except (OSError, EOFError):
            if not self._ended.is_set():
                logger.warning("the server is gone: its requests end here")
        except BadFrameError as error:
            logger.error("the server is left: %s", error)
        self._ended.set()
        self._client.close()

    def _beat(self) -> None:
        """Runs in a thread: the server hears every second how it is."""
        try:
            while not self._ended.wait(BEAT_S):
                self._wire.send(Alive(self._client.stalls))
        except (OSError, EOFError):
            self._ended.set()
