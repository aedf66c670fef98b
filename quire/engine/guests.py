"""Replicas that other hosts bring to a server: where they join it, and the clients of their cores.

Invariant: a host may come, go and come back at any time; until it is there its replica has no core. Which replicas
those are is settled, and what does not fit is refused on the connection, with the reason, and costs the server nothing.
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
from quire.engine.core_client import CoreClient
from quire.engine.messages import WIRE_VERSION, CoreMessage, CoreRequest, Shutdown
from quire.engine.progress import STALL_S, named_in
from quire.engine.replica_wire import (
    Alive,
    BadFrameError,
    CoreLost,
    FromReplica,
    ReplicaHello,
    Wire,
    arithmetic_of,
    decoded,
    facts_of,
    heard_from,
    sent_to,
)
from quire.errors import EngineDeadError, StartupError
from quire.joining import Place, answered, heard, listening
from quire.kernels.cpu.instruction_sets import VARIABLE
from quire.version import __version__

logger = logging.getLogger(__name__)

JOIN_S = 300.0
"""Hosts are started by hand or by a scheduler, one after the other."""
POLL_S = 0.2
CLOSE_S = 5.0
LEAVE_S = 3.0
"""A host may be back before it is noticed here that it has gone."""
SILENCE_S = 30.0
"""A host says every second that it is there; one that is silent for so long is stopped, or worse."""


class Joined(NamedTuple):
    """A replica that has joined: the way to it, and by how much this host's clock is ahead of its own."""

    wire: Wire
    ahead_s: float


class Guests:
    """The port at which replicas of other hosts join, held as long as the server is there."""

    def __init__(self, config: EngineConfig) -> None:
        self._parallel = config.parallel
        self._facts, self._arithmetic = facts_of(config), arithmetic_of(config)
        self._arrived = {replica: SimpleQueue[Joined]() for replica in config.parallel.guests}
        self._hopeless: dict[int, str] = {}
        self._inside: set[int] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._is_closed = False

    def open(self, place: Place) -> int:
        """Let replicas in at this address and port, or any that is free (0); returns the port.

        Raises:
            StartupError: it is taken, as by another server, or the address is none of this host.
        """
        listener = listening(place, "--data-parallel-address and --data-parallel-rpc-port")
        with self._lock:
            self._listener = listener
            if self._is_closed:
                listener.close()
                return 0
        threading.Thread(target=self._let_in, args=[listener], name="quire-guests", daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def client(self, replica: int, join_s: float = JOIN_S) -> GuestClient:
        """That of a replica which is yet to join, or to join again."""
        address, port = self._parallel.join_place
        hint = (
            "start there, with the other options as here: quire serve --headless --data-parallel-start-rank "
            f"{replica} --data-parallel-size-local N --data-parallel-address {address} --data-parallel-rpc-port {port}"
        )
        return GuestClient(self, replica, hint, join_s)

    def give_up(self, replicas: Iterable[int], problem: str) -> None:
        """Whoever still waits for these to join for the first time waits in vain, for this reason."""
        self._hopeless |= dict.fromkeys(replicas, problem)

    def why_hopeless(self, replica: int) -> str | None:
        """The reason, if it was given up."""
        return self._hopeless.get(replica)

    def next(self, replica: int) -> Joined | None:
        """The replica, once it has joined; waits for a moment."""
        try:
            return self._arrived[replica].get(timeout=POLL_S)
        except Empty:
            return None

    def left(self, replica: int) -> None:
        """It has gone, so that it may join again."""
        self._inside.discard(replica)

    def close(self) -> None:
        """Let the port go, and who has joined and is not wanted any more; twice is fine."""
        with self._lock:
            self._is_closed, listener = True, self._listener
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which wakes who accepts
            listener.close()
        for arrived in self._arrived.values():
            while not arrived.empty():
                arrived.get().wire.release()

    def _let_in(self, listener: socket.socket) -> None:
        """Runs in a thread; who comes is heard in another, so that one who says nothing keeps nobody waiting."""
        while True:
            try:
                guest, peer = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._welcome, args=(guest, peer[0]), daemon=True).start()

    def _welcome(self, guest: socket.socket, address: str) -> None:
        hello = heard(guest, ReplicaHello)
        ahead_s = time.monotonic() - hello.now if hello else 0.0
        problem = "this is no replica of quire" if hello is None else self._took(hello)
        is_told = answered(guest, problem)
        if hello is None or problem:
            logger.warning("a connection from %s is refused: %s", address, problem)
            guest.close()
        elif is_told:
            logger.info("replica %d has joined from %s", hello.replica, address)
            self._compare(hello)
            self._arrived[hello.replica].put(Joined(Wire(guest), ahead_s))
        else:
            guest.close()
            self.left(hello.replica)

    def _took(self, hello: ReplicaHello) -> str:
        """Why one cannot join; empty: it has its place."""
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
        """Say whether an answer may depend on who computes it; that is no reason to have no replica."""
        if hello.arithmetic != self._arithmetic:
            logger.warning(
                "replica %d computes by %s and this host by %s: the same request may have other tokens there; "
                "%s set to an instruction set that all processors run makes them the same",
                *(hello.replica, hello.arithmetic, self._arithmetic, VARIABLE),
            )

    def _problem(self, hello: ReplicaHello) -> str:
        """Why one cannot join, for its operator; empty: it can."""
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


class GuestClient(CoreClient):
    """A core of another host, which that host starts, and starts again.

    Args:
        hint: what to do there, for the operator.
        join_s: how long `receive` waits for it to be there and to have loaded; for ever, it may go and come back.
    """

    def __init__(self, guests: Guests, replica: int, hint: str, join_s: float) -> None:
        self._guests, self._replica, self._hint = guests, replica, hint
        self._until, self._join_s = time.monotonic() + join_s, join_s
        self._decoder = msgspec.msgpack.Decoder(FromReplica)
        self._outbox: SimpleQueue[CoreRequest | None] = SimpleQueue()
        self._joined: Joined | None = None
        self._lost: EngineDeadError | None = None
        self._alive = Alive(stalls=False)
        self._heard_at = 0.0
        self._in_work: set[bytes] = set()
        self._closed = threading.Event()

    @property
    def stalls(self) -> bool:
        return self._alive.stalls or time.monotonic() - self._heard_at > STALL_S

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        return named_in(self._in_work, request_ids)

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

    def _join(self) -> Joined | None:
        """Wait a moment for the replica; raises StartupError when that has taken too long, or is in vain."""
        joined = self._guests.next(self._replica)
        if joined is None:
            if math.isfinite(self._until) and (problem := self._guests.why_hopeless(self._replica)):
                raise StartupError(problem)
            if time.monotonic() > self._until:
                raise StartupError(
                    f"replica {self._replica} has not joined within {self._join_s:g} s; {self._hint}"
                )
            return None
        self._joined, self._heard_at = joined, time.monotonic()
        way = joined.wire, joined.ahead_s
        self._passing = threading.Thread(target=self._pass_on, args=way, name="quire-guest", daemon=True)
        self._passing.start()
        return joined

    def _next(self, joined: Joined) -> CoreMessage | None:
        """What the core says, if it does within a moment."""
        if not joined.wire.poll(POLL_S):
            if time.monotonic() - self._heard_at > SILENCE_S:
                raise EngineDeadError(f"its host is silent for {SILENCE_S:g} s")
            return None
        message = decoded(self._decoder, joined.wire.receive())
        self._heard_at = time.monotonic()
        if isinstance(message, Alive):
            self._alive = message
            return None
        if isinstance(message, CoreLost):
            self._in_work = set(message.in_work)
            raise EngineDeadError(message.message)
        return heard_from(message, joined.ahead_s)

    def _loss(self, error: Exception) -> EngineDeadError:
        """The host, or its core, is gone; another client waits for it to come back."""
        self._leave()
        return EngineDeadError(
            f"replica {self._replica} of another host is gone: {str(error) or 'the connection was closed'}"
        )

    def _leave(self) -> None:
        """Let go of the connection, behind what is still to be sent."""
        self._outbox.put(None)
        if self._joined is not None:
            self._passing.join(CLOSE_S)
            self._joined.wire.release()
            self._guests.left(self._replica)
            self._joined = None

    def _pass_on(self, wire: Wire, ahead_s: float) -> None:
        """Runs in a thread: who sends must wait for nobody."""
        try:
            while (message := self._outbox.get()) is not None:
                wire.send(sent_to(message, ahead_s))
        except (OSError, EOFError):
            logger.info("replica %d hears nothing any more", self._replica)


def _shown(replicas: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(replicas)))
