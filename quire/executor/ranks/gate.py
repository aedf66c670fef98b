# SPDX-License-Identifier: Apache-2.0
"""Listener for ranks started by other hosts or by Ray.

Invariant: for each rank its launcher opens a connection, sends a hello, and, once accepted, passes the socket to the
rank's process. Other peers are refused with a reason, at no cost to the engine.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec

from quire import joining
from quire.config.device import ParallelConfig
from quire.errors import StartupError
from quire.version import __version__

logger = logging.getLogger(__name__)

JOIN_S = 300.0  # Hosts are started one after the other, by hand or by a scheduler.
POLL_S = 1.0


class RankHello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Join request of a rank; all but the rank and host numbers must be the engine's."""

    version: str
    num_ranks: int
    nnodes: int
    node_rank: int
    rank: int
    key: str = ""  # Secret that the engine gave to the ranks it expects, if any.

    @staticmethod
    def create(parallel: ParallelConfig, rank: int, key: str = "") -> RankHello:
        """Return the hello of a rank of this host."""
        return RankHello(__version__, parallel.num_ranks, parallel.nnodes, parallel.node_rank, rank, key)


class Arrival(NamedTuple):
    """Connection with its peer's address and hello; None: malformed or too late."""

    connection: socket.socket
    address: str
    hello: RankHello | None


class RankAcceptor:
    """Join port on the engine's host, open as long as the engine runs.

    Args:
        place: address and port; 0: a free one.
        wanted: expected rank -> host number.

    Raises:
        StartupError: the port is taken, as by another engine, or the address is none of this host.
    """

    def __init__(
        self, parallel: ParallelConfig, place: tuple[str, int], wanted: Mapping[int, int], key: str = ""
    ) -> None:
        self._parallel, self._wanted, self._key = parallel, wanted, key
        self._listener = joining.listening(place, "--master-addr and --master-port")

    @staticmethod
    def of_hosts(parallel: ParallelConfig) -> RankAcceptor:
        """Listen on the first of several hosts, for the ranks of the others."""
        others = range(1, parallel.nnodes)
        wanted = {rank: node for node in others for rank in parallel.ranks_of(node)}
        return RankAcceptor(parallel, (parallel.master_addr, parallel.master_port), wanted)

    @property
    def port(self) -> int:
        """Port number."""
        port: int = self._listener.getsockname()[1]
        return port

    def accept_ranks(
        self, join_s: float = JOIN_S, look: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """Wait for all expected ranks; returns a connection to each.

        Args:
            look: called now and then; raises if waiting is pointless.

        Raises:
            StartupError: not all joined; names their hosts.
        """
        inside: dict[int, socket.socket] = {}
        arrivals, over = SimpleQueue[Arrival](), threading.Event()
        threading.Thread(
            target=self._accept, args=(arrivals, over), name="quire-rank-join", daemon=True
        ).start()
        until = time.monotonic() + join_s
        try:
            while missing := sorted(self._wanted.keys() - inside.keys()):
                look()
                if time.monotonic() > until:
                    raise StartupError(self._missing(missing, join_s))
                with contextlib.suppress(Empty):
                    self._receive(
                        arrivals.get(timeout=min(POLL_S, max(until - time.monotonic(), 0.001))), inside
                    )
        except BaseException:
            for way in inside.values():
                way.close()
            raise
        finally:
            over.set()
            _close_late(arrivals)
        return inside

    def close(self) -> None:
        """Close the port; may be called twice."""
        self._listener.close()

    def _accept(self, arrivals: SimpleQueue[Arrival], over: threading.Event) -> None:
        """Accept loop in a thread; each peer is read in another, so that a silent one blocks nobody."""
        self._listener.settimeout(POLL_S)
        while not over.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            threading.Thread(
                target=_read_hello, args=(connection, peer[0], arrivals, over), daemon=True
            ).start()

    def _receive(self, arrival: Arrival, inside: dict[int, socket.socket]) -> None:
        connection, address, hello = arrival
        problem = "the peer is not a quire rank" if hello is None else self._problem(hello, inside)
        if hello is None or problem:
            logger.warning("a connection from %s is refused: %s", address, problem)
            joining.send_answer(connection, problem)
            connection.close()
        elif joining.send_answer(connection, ""):
            if hello.rank in inside:  # the host was lost and rejoins
                inside[hello.rank].close()
            inside[hello.rank] = connection
            logger.info("rank %d of host %d has joined from %s", hello.rank, hello.node_rank, address)

    def _problem(self, hello: RankHello, inside: dict[int, socket.socket]) -> str:
        """Return why a rank cannot join, for its operator; empty: it can."""
        own, node = self._parallel, hello.node_rank
        facts = {
            "version of quire": (hello.version, __version__),
            "number of ranks": (hello.num_ranks, own.num_ranks),
            "--nnodes": (hello.nnodes, own.nnodes),
        }
        for name, (theirs, ours) in facts.items():
            if theirs != ours:
                return f"all hosts must have the same {name}, which is {theirs} here and {ours} on the first host"
        if not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            return "it belongs to another engine"
        if self._wanted.get(hello.rank) != node:
            return f"there is no rank {hello.rank} on a host {node} of {own.nnodes}"
        if hello.rank in inside and not _is_gone(inside[hello.rank]):
            return f"a host with --node-rank {node} has joined before"
        return ""

    def _missing(self, ranks: list[int], join_s: float) -> str:
        own, nodes = self._parallel, sorted({self._wanted[rank] for rank in ranks})
        if own.nnodes == 1:
            return f"ranks {', '.join(map(str, ranks))} have not joined within {join_s:g} s"
        return (
            f"host {', '.join(map(str, nodes))} of {own.nnodes} has not joined within {join_s:g} s; start there, with "
            f"the other options as here: quire serve --headless --nnodes {own.nnodes} --node-rank {nodes[0]} "
            f"--master-addr {own.master_addr} --master-port {own.master_port}"
        )


def join(place: tuple[str, int], hello: RankHello, join_s: float = JOIN_S) -> socket.socket:
    """Connect a rank of this host to the executor, which may start later.

    Raises:
        StartupError: no connection within `join_s`, or the rank is refused; has the reason.
    """
    way = joining.connect_to_first_host(place, f"host {hello.node_rank}", join_s)
    assert way is not None, "it cannot be stopped"
    return joining.introduce(way, hello, place)


def _read_hello(
    connection: socket.socket, address: str, arrivals: SimpleQueue[Arrival], over: threading.Event
) -> None:
    arrivals.put(Arrival(connection, address, joining.receive_hello(connection, RankHello)))
    if over.is_set():
        _close_late(arrivals)


def _close_late(arrivals: SimpleQueue[Arrival]) -> None:
    """Close connections that arrive when no rank is expected any more."""
    with contextlib.suppress(Empty):
        while True:
            arrivals.get_nowait().connection.close()


def _is_gone(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        try:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionError:
            return True
    return False
