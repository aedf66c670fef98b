# SPDX-License-Identifier: Apache-2.0
"""Replicas on other hosts: the port at which they join the server, and the clients of their cores.

Invariant: a host may join, leave and rejoin at any time; until then its replica has no core. The set of
replicas is fixed. A mismatching one is refused on the connection, with the reason, at no cost to the server.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec

from quire.config import EngineConfig
from quire.engine.client import CoreClient
from quire.engine.core_progress import requests_with_digests
from quire.engine.messages import WIRE_VERSION, CoreMessage, CoreRequest, Shutdown
from quire.engine.replicas.replica_wire import (
    Alive,
    BadFrameError,
    FromReplica,
    ReplicaCoreLost,
    ReplicaHello,
    ReplicaWire,
    arithmetic_of,
    decoded,
    facts_of,
    received_from,
    sent_to,
)
from quire.engine.supervision import STALL_S
from quire.errors import EngineDeadError, StartupError
from quire.joining import Place, listening, receive_hello, send_answer
from quire.kernels.cpu.instruction_sets import VARIABLE
from quire.version import __version__

logger = logging.getLogger(__name__)

JOIN_S = 300.0  # Hosts are started one after the other, by hand or by a scheduler.
POLL_S = 0.2
CLOSE_S = 5.0
LEAVE_S = 3.0  # A host may rejoin before its loss is detected.
SILENCE_S = 30.0  # A host sends a sign of life every second; after this silence it counts as lost.


class JoinedReplica(NamedTuple):
    """Joined replica: its wire, and by how many seconds this host's clock is ahead of its clock."""

    wire: ReplicaWire
    ahead_s: float


class RemoteReplicas:
    """Port at which replicas of other hosts join, open as long as the server runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._parallel = config.parallel
        self._facts, self._arithmetic = facts_of(config), arithmetic_of(config)
        self._arrived = {replica: SimpleQueue[JoinedReplica]() for replica in config.parallel.remote_replicas}
        self._given_up: dict[int, str] = {}
        self._inside: set[int] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._is_closed = False

    def open(self, place: Place) -> int:
        """Listen at this address and port, or any free one (0); returns the port.

        Raises:
            StartupError: it is taken, as by another server, or the address is none of this host.
        """
        listener = listening(place, "--data-parallel-address and --data-parallel-rpc-port")
        with self._lock:
            self._listener = listener
            if self._is_closed:
                listener.close()
                return 0
        threading.Thread(target=self._accept_loop, args=[listener], name="quire-join", daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def client(self, replica: int, join_s: float = JOIN_S) -> RemoteReplicaClient:
        """Return a client of a replica that is to join, or to rejoin."""
        address, port = self._parallel.join_place
        hint = (
            "start there, with the other options as here: quire serve --headless --data-parallel-start-rank "
            f"{replica} --data-parallel-size-local N --data-parallel-address {address} --data-parallel-rpc-port {port}"
        )
        return RemoteReplicaClient(self, replica, hint, join_s)

    def give_up(self, replicas: Iterable[int], problem: str) -> None:
        """Give up waiting for the first join of these replicas, for this reason."""
        self._given_up |= dict.fromkeys(replicas, problem)

    def give_up_reason(self, replica: int) -> str | None:
        """Return the reason if the replica was given up."""
        return self._given_up.get(replica)

    def next(self, replica: int) -> JoinedReplica | None:
        """Return the replica once it has joined; waits POLL_S for it."""
        try:
            return self._arrived[replica].get(timeout=POLL_S)
        except Empty:
            return None

    def left(self, replica: int) -> None:
        """Record that a replica has left, so that it may rejoin."""
        self._inside.discard(replica)

    def close(self) -> None:
        """Close the port and the unused connections; may be called twice."""
        with self._lock:
            self._is_closed, listener = True, self._listener
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accept loop
            listener.close()
        for arrived in self._arrived.values():
            while not arrived.empty():
                arrived.get().wire.release()

    def _accept_loop(self, listener: socket.socket) -> None:
        """Accept loop in a thread; each peer is handled in another, so that a silent one blocks nobody."""
        while True:
            try:
                connection, peer = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._handle_join, args=(connection, peer[0]), daemon=True).start()

    def _handle_join(self, connection: socket.socket, address: str) -> None:
        hello = receive_hello(connection, ReplicaHello)
        ahead_s = time.monotonic() - hello.now if hello else 0.0
        problem = "the peer is not a quire replica" if hello is None else self._claim_place(hello)
        is_answered = send_answer(connection, problem)
        if hello is None or problem:
            logger.warning("a connection from %s is refused: %s", address, problem)
            connection.close()
        elif is_answered:
            logger.info("replica %d has joined from %s", hello.replica, address)
            self._compare(hello)
            self._arrived[hello.replica].put(JoinedReplica(ReplicaWire(connection), ahead_s))
        else:
            connection.close()
            self.left(hello.replica)

    def _claim_place(self, hello: ReplicaHello) -> str:
        """Return why a replica cannot join; empty: its place is taken."""
        until = time.monotonic() + LEAVE_S
        while True:
            with self._lock:
                problem = self._problem(hello)
                is_free = hello.replica not in self._inside
                if not problem and is_free:
                    self._inside.add(hello.replica)
            if problem or is_free:
                return problem
            if time.monotonic() > until:
                return f"replica {hello.replica} has joined before; --data-parallel-start-rank says which a host has"
            time.sleep(POLL_S)

    def _compare(self, hello: ReplicaHello) -> None:
        """Warn if results may depend on the replica; that is no reason to refuse it."""
        if hello.arithmetic != self._arithmetic:
            logger.warning(
                "replica %d computes with %s and this host with %s: the same request may get other tokens there; "
                "set %s to an instruction set that all processors support",
                *(hello.replica, hello.arithmetic, self._arithmetic, VARIABLE),
            )

    def _problem(self, hello: ReplicaHello) -> str:
        """Return why a replica cannot join, for its operator; empty: it can."""
        if (hello.version, hello.wire_version) != (__version__, WIRE_VERSION):
            return f"its version of quire is {hello.version}, and {__version__} here"
        names = hello.facts.keys() | self._facts.keys()
        other = sorted(name for name in names if hello.facts.get(name) != self._facts.get(name))
        if other:
            return f"all hosts must have the same {', '.join(other)}"
        if hello.replica not in self._arrived:
            return (
                f"there is no replica {hello.replica} to come from another host, but {_shown(self._arrived)}"
            )
        return ""


class RemoteReplicaClient(CoreClient):
    """Client of a core on another host, which that host starts and restarts.

    Args:
        hint: instructions for the operator.
        join_s: seconds that `receive` waits for it to join and load; inf: it may leave and rejoin.
    """

    def __init__(self, replicas: RemoteReplicas, replica: int, hint: str, join_s: float) -> None:
        self._replicas, self._replica, self._hint = replicas, replica, hint
        self._until, self._join_s = time.monotonic() + join_s, join_s
        self._decoder = msgspec.msgpack.Decoder(FromReplica)
        self._outbox: SimpleQueue[CoreRequest | None] = SimpleQueue()
        self._joined: JoinedReplica | None = None
        self._lost: EngineDeadError | None = None
        self._alive = Alive(stalls=False)
        self._heard_at = 0.0
        self._in_work: set[bytes] = set()
        self._closed = threading.Event()

    @property
    def stalls(self) -> bool:
        return self._alive.stalls or time.monotonic() - self._heard_at > STALL_S

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        return requests_with_digests(self._in_work, request_ids)

    def send(self, message: CoreRequest) -> None:
        self._outbox.put(message)

    def receive(self) -> list[CoreMessage]:
        while not self._closed.is_set():
            if self._lost is not None:
                raise self._lost
            joined = self._joined or self._join()
            try:
                message = None if joined is None else self._next(joined)
            except (OSError, EOFError, BadFrameError, EngineDeadError) as error:
                self._lost = self._loss(error)
                continue
            if message is not None:
                return [message]
        self._leave()
        return []

    def close(self) -> None:
        if not self._closed.is_set():
            self.send(Shutdown())
            self._closed.set()

    def _join(self) -> JoinedReplica | None:
        """Poll once for the replica; raises StartupError when that took too long, or it was given up."""
        joined = self._replicas.next(self._replica)
        if joined is None:
            if math.isfinite(self._until) and (problem := self._replicas.give_up_reason(self._replica)):
                raise StartupError(problem)
            if time.monotonic() > self._until:
                raise StartupError(
                    f"replica {self._replica} has not joined within {self._join_s:g} s; {self._hint}"
                )
            return None
        self._joined, self._heard_at = joined, time.monotonic()
        way = joined.wire, joined.ahead_s
        self._sender = threading.Thread(target=self._send_loop, args=way, name="quire-replica", daemon=True)
        self._sender.start()
        return joined

    def _next(self, joined: JoinedReplica) -> CoreMessage | None:
        """Return the core's next message if it arrives within POLL_S."""
        if not joined.wire.poll(POLL_S):
            if time.monotonic() - self._heard_at > SILENCE_S:
                raise EngineDeadError(f"its host has been silent for {SILENCE_S:g} s")
            return None
        message = decoded(self._decoder, joined.wire.receive())
        self._heard_at = time.monotonic()
        if isinstance(message, Alive):
            self._alive = message
            return None
        if isinstance(message, ReplicaCoreLost):
            self._in_work = set(message.in_work)
            raise EngineDeadError(message.message)
        return received_from(message, joined.ahead_s)

    def _loss(self, error: Exception) -> EngineDeadError:
        """Report the loss of the host or its core; another client waits for its return."""
        self._leave()
        return EngineDeadError(
            f"replica {self._replica} of another host is gone: {str(error) or 'the connection was closed'}"
        )

    def _leave(self) -> None:
        """Close the connection after the pending messages."""
        self._outbox.put(None)
        if self._joined is not None:
            self._sender.join(CLOSE_S)
            self._joined.wire.release()
            self._replicas.left(self._replica)
            self._joined = None

    def _send_loop(self, wire: ReplicaWire, ahead_s: float) -> None:
        """Thread body that sends messages, so that senders never block."""
        try:
            while (message := self._outbox.get()) is not None:
                wire.send(sent_to(message, ahead_s))
        except (OSError, EOFError):
            logger.info("replica %d is no longer reachable", self._replica)


def _shown(replicas: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(replicas)))
