"""How ranks that others have started come to the executor, which speaks to all ranks alike.

Invariant: for each rank somebody opens a connection, says on it which that is, and, once that is welcome, leaves it to
the rank's process. What is no rank of this engine is told so, and costs the engine nothing.
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

JOIN_S = 300.0
"""Hosts are started by hand or by a scheduler, one after the other."""
LOOK_S = 1.0


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Who wants to join; all but the numbers of rank and host must be the engine's."""

    version: str
    num_ranks: int
    nnodes: int
    node_rank: int
    rank: int
    key: str = ""
    """What the engine has told those that it wants, if it has told them anything."""

    @staticmethod
    def of(parallel: ParallelConfig, rank: int, key: str = "") -> Hello:
        """That of a rank of this host."""
        return Hello(__version__, parallel.num_ranks, parallel.nnodes, parallel.node_rank, rank, key)


class Arrival(NamedTuple):
    """A connection, where it comes from, and what it has said of itself; None: no word of ours, or none in time."""

    guest: socket.socket
    address: str
    hello: Hello | None


class Gate:
    """A port of the engine's host, held as long as the engine is there.

    Args:
        place: address and port; 0: a free one.
        wanted: the number of each rank that is to come, and of its host.

    Raises:
        StartupError: the port is taken, as by another engine, or the address is none of this host.
    """

    def __init__(
        self, parallel: ParallelConfig, place: tuple[str, int], wanted: Mapping[int, int], key: str = ""
    ) -> None:
        self._parallel, self._wanted, self._key = parallel, wanted, key
        self._listener = joining.listening(place, "--master-addr and --master-port")

    @staticmethod
    def of_hosts(parallel: ParallelConfig) -> Gate:
        """That of the first of several hosts, for the ranks of the others."""
        others = range(1, parallel.nnodes)
        wanted = {rank: node for node in others for rank in parallel.ranks_of(node)}
        return Gate(parallel, (parallel.master_addr, parallel.master_port), wanted)

    @property
    def port(self) -> int:
        """Where it is."""
        port: int = self._listener.getsockname()[1]
        return port

    def let_in(
        self, join_s: float = JOIN_S, look: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """Wait for all ranks that are wanted; returns a connection to each.

        Args:
            look: asked now and then; raises if it is no use to wait.

        Raises:
            StartupError: not all came; the message names their hosts.
        """
        inside: dict[int, socket.socket] = {}
        arrivals, over = SimpleQueue[Arrival](), threading.Event()
        threading.Thread(target=self._accept, args=(arrivals, over), name="quire-gate", daemon=True).start()
        until = time.monotonic() + join_s
        try:
            while missing := sorted(self._wanted.keys() - inside.keys()):
                look()
                if time.monotonic() > until:
                    raise StartupError(self._missing(missing, join_s))
                with contextlib.suppress(Empty):
                    self._receive(
                        arrivals.get(timeout=min(LOOK_S, max(until - time.monotonic(), 0.001))), inside
                    )
        except BaseException:
            for way in inside.values():
                way.close()
            raise
        finally:
            over.set()
            _send_away(arrivals)
        return inside

    def close(self) -> None:
        """Let the port go; twice is fine."""
        self._listener.close()

    def _accept(self, arrivals: SimpleQueue[Arrival], over: threading.Event) -> None:
        """Runs in a thread; who comes is heard in another, so that one who says nothing keeps nobody waiting."""
        self._listener.settimeout(LOOK_S)
        while not over.is_set():
            try:
                guest, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            threading.Thread(target=_hear, args=(guest, peer[0], arrivals, over), daemon=True).start()

    def _receive(self, arrival: Arrival, inside: dict[int, socket.socket]) -> None:
        guest, address, hello = arrival
        problem = "this is no rank of quire" if hello is None else self._problem(hello, inside)
        if hello is None or problem:
            logger.warning("a connection from %s is refused: %s", address, problem)
            joining.answered(guest, problem)
            guest.close()
        elif joining.answered(guest, ""):
            if hello.rank in inside:  # a host that has gone comes again
                inside[hello.rank].close()
            inside[hello.rank] = guest
            logger.info("rank %d of host %d has joined from %s", hello.rank, hello.node_rank, address)

    def _problem(self, hello: Hello, inside: dict[int, socket.socket]) -> str:
        """Why one cannot join, for its operator; empty: it can."""
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


def join(place: tuple[str, int], hello: Hello, join_s: float = JOIN_S) -> socket.socket:
    """A connection from a rank of this host to the executor, which may be yet to come.

    Raises:
        StartupError: there is none within `join_s`, or it has no place for this rank; the message says why.
    """
    way = joining.opened(place, f"host {hello.node_rank}", join_s)
    assert way is not None, "nobody stops it"
    return joining.introduced(way, hello, place)


def _hear(guest: socket.socket, address: str, arrivals: SimpleQueue[Arrival], over: threading.Event) -> None:
    arrivals.put(Arrival(guest, address, joining.heard(guest, Hello)))
    if over.is_set():
        _send_away(arrivals)


def _send_away(arrivals: SimpleQueue[Arrival]) -> None:
    """Those that have come when nobody is wanted any more."""
    with contextlib.suppress(Empty):
        while True:
            arrivals.get_nowait().guest.close()


def _is_gone(guest: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        try:
            return not guest.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionError:
            return True
    return False
