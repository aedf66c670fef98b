# SPDX-License-Identifier: Apache-2.0
"""Gloo groups of rank processes: over the loopback on one host, over the network between hosts.

Invariant: no global state of torch.distributed is touched, so a process may be in several groups.

`Heartbeats`: numbers in the common store, because only its own host sees that a process is stopped. Invariant: a
rank's number grows for as long as its process runs, whatever its program does.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from quire.distributed.group import COLLECTIVE_TIMEOUT_S, Group
from quire.errors import RankLostError, StartupError
from quire.processes import STOPPED, why_silent

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 6.0  # A rank whose number has not grown for so long is stopped, or its host is gone.

_torch: Any = torch.distributed  # torch's types do not declare its exports


class Heartbeats:
    """Heartbeats of one process, and those it has read of others.

    Args:
        address, port: of the store where the ranks have met.
    """

    def __init__(self, rank: int, address: str, port: int) -> None:
        store = _torch.TCPStore(
            address, port, None, False, timedelta(seconds=SILENCE_S), wait_for_workers=False
        )
        self._store = _torch.PrefixStore("quire.heartbeats", store)
        self._is_there = True
        self._seen: dict[int, tuple[int, float]] = {}
        ended = threading.Event()
        self._end = weakref.finalize(self, ended.set)
        args = self._store, rank, ended
        threading.Thread(target=_send_heartbeats, args=args, name="quire-heartbeats", daemon=True).start()

    def silence_of(self, rank: int) -> float:
        """Return the seconds since another rank's last observed heartbeat.

        Without a store, which fails with the rank that serves it, this is infinite.
        """
        number, now = self._number_of(rank), time.monotonic()
        if number is None:
            return inf
        if rank not in self._seen or number != self._seen[rank][0]:
            self._seen[rank] = number, now
        return now - self._seen[rank][1]

    def close(self) -> None:
        """Stop the heartbeats."""
        self._end()

    def _number_of(self, rank: int) -> int | None:
        """Return the last heartbeat number; -1 before the first; None: the store is lost and not queried again."""
        if not self._is_there:
            return None
        try:
            return int(self._store.get(str(rank))) if self._store.check([str(rank)]) else -1
        except RuntimeError as error:
            logger.info("heartbeats cannot be read: %s", str(error).splitlines()[0])
            self._is_there = False
            return None


def _send_heartbeats(store: Any, rank: int, ended: threading.Event) -> None:
    """Thread body: write heartbeats until closed, or until the store is lost."""
    number = time.monotonic_ns()  # differs from that of an earlier engine of the program
    while not ended.is_set():
        number += 1
        try:
            store.set(str(rank), str(number))
        except RuntimeError as error:
            logger.info("rank %d: heartbeats stopped: %s", rank, str(error).splitlines()[0])
            return
        ended.wait(HEARTBEAT_S)


class Outbox:
    """Thread that runs deliveries in order, until one fails; later ones fail with it."""

    def __init__(self) -> None:
        self._deliveries: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="quire-outbox", daemon=True).start()

    def put(self, deliver: Callable[[], None]) -> None:
        """Enqueue a delivery; raises the error of an earlier one."""
        if self._failure is not None:
            raise self._failure
        self._deliveries.put(deliver)

    def _run(self) -> None:
        while self._failure is None:
            try:
                self._deliveries.get()()
            except BaseException as failure:
                self._failure = failure


POLL_S = 1.0
"""Time until a process with closed connections is seen as gone, and interval between two polls while waiting."""
STOPPED_POLLS = 5  # Consecutive polls after which a stopped process is given up.

_UNUSED_TAG = 1  # Tag that no rank sends.

Store = Any  # torch.distributed.Store


class Gloo(Group):
    """One process of a gloo group.

    Args:
        store: where the ranks find each other, such as `torch.distributed.FileStore` or `torch.distributed.TCPStore`.
        address: of this host, as the others reach it.
        join_s: seconds to wait for the others to join.
        beats: heartbeats of ranks of other hosts; without them other hosts' losses are detected after `answer_s`.

    Raises:
        StartupError: not all ranks joined; names the missing ones.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        address: str = "127.0.0.1",
        join_s: float = 60.0,
        answer_s: float = COLLECTIVE_TIMEOUT_S,
        names: Sequence[int] | None = None,
        beats: Heartbeats | None = None,
    ) -> None:
        super().__init__(rank, size, names)
        self._beats = beats
        self._processes = _meet(rank, size, store, join_s)
        options = _torch.ProcessGroupGloo._Options()
        options._devices = [_torch.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=answer_s)
        self._outbox: Outbox | None = None
        self._open: list[Any] = [
            _torch.ProcessGroupGloo(_torch.PrefixStore("gloo", store), rank, size, options)
        ]
        # Its threads free tensors, which needs the interpreter, so they must end before it does.
        self._end = weakref.finalize(self, self._open.clear)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        own = _as_bytes(x)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        if own.numel():
            self._wait_for_all(lambda: self._group.allgather([gathered], [own]))
        gathered[self.rank] = own
        return [part.view(x.dtype).view(x.shape) for part in gathered]

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        rest, dtype = parts[0].shape[1:], parts[0].dtype
        row_bytes = parts[0].new_empty((1, *rest)).nbytes
        counts = self.all_gather(torch.tensor([len(part) for part in parts]))
        given = torch.cat([_as_bytes(part) for part in parts])
        came = [int(row[self.rank]) * row_bytes for row in counts]
        taken = torch.empty(sum(came), dtype=torch.uint8)
        gave = [part.nbytes for part in parts]
        if any(int(row.sum()) for row in counts) and row_bytes:
            self._wait_for_all(lambda: self._group.alltoall_base(taken, given, came, gave))
        return [part.view(dtype).view(-1, *rest) for part in torch.split(taken, came)]

    def send(self, x: Tensor, to: int) -> None:
        self.check_peer(to)
        group, copy = self._group, _as_bytes(x).clone()
        if self._outbox is None:
            self._outbox = Outbox()
        self._outbox.put(lambda: self._wait(lambda: group.send([copy], to, 0)))

    def recv(self, out: Tensor, source: int) -> None:
        self.check_peer(source)
        self._wait(lambda: self._group.recv([_as_bytes(out)], source, 0))

    def silent(self) -> dict[int, str]:
        """Return rank -> reason for ranks of this host whose processes cannot run, as from `why_silent`."""
        found = {rank: why_silent(self._processes[rank][1]) for rank in self._here()}
        return {rank: how for rank, how in found.items() if how is not None}

    def host_of(self, rank: int) -> str:
        """Return the host name of a rank."""
        return self._processes[rank][0]

    def close(self, reason: str = "it has ended") -> None:
        self._end()
        if self._beats is not None:
            self._beats.close()

    @property
    def _group(self) -> Any:
        return self._open[0]

    def _wait(self, start: Callable[[], Any]) -> None:
        """Wait for a send or receive, as long as it takes, even if the peer is stopped."""
        try:
            start().wait()
        except RuntimeError as error:
            raise self._loss(str(error).splitlines()[0]) from error

    def _wait_for_all(self, start: Callable[[], Any]) -> None:
        """Wait for a collective, or abort it if another process has been stopped for a while."""
        num_polls = 0
        try:
            work = start()
            while not _is_done(work):
                stopped = [rank for rank in self._here() if why_silent(self._processes[rank][1]) == STOPPED]
                num_polls = num_polls + 1 if stopped else 0
                if num_polls >= STOPPED_POLLS:
                    self._abort_collective(stopped[0])
                if silent := self._silent_elsewhere(SILENCE_S):
                    self._abort_collective(silent[0])
        except RuntimeError as error:
            raise self._loss(str(error).splitlines()[0]) from error

    def _abort_collective(self, rank: int) -> None:
        """Abort the collective on all ranks: gloo does so when a receive times out."""
        unused = torch.empty(1, dtype=torch.uint8)
        self._group.recv([unused], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def _loss(self, said: str) -> RankLostError:
        """Return the error naming the lost ranks; on other hosts, all ranks without heartbeats are suspects."""
        until = time.monotonic() + POLL_S
        while True:
            gone = [rank for rank in self._here() if why_silent(self._processes[rank][1])]
            gone += self._silent_elsewhere(SILENCE_S / 2)
            if gone or time.monotonic() > until:
                return self.lost_error(gone or self._others(), said)
            time.sleep(0.02)

    def _here(self) -> list[int]:
        return [rank for rank in self._others() if self._processes[rank][0] == socket.gethostname()]

    def _silent_elsewhere(self, seconds: float) -> list[int]:
        """Return ranks of other hosts without heartbeats for `seconds`."""
        if self._beats is None:
            return []
        here = self._here()
        return [
            rank
            for rank in self._others()
            if rank not in here and self._beats.silence_of(self.names[rank]) >= seconds
        ]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def prefix_store(store: Store, name: str) -> Store:
    """Return a store for a subgroup."""
    return _torch.PrefixStore(name, store)


def file_store(path: Path, size: int) -> Store:
    """Return a store for ranks of one host: a file, which need not exist yet."""
    return _torch.FileStore(str(path), size)


def tcp_store(address: str, port: int, rank: int, *, serves: bool, join_s: float) -> Store:
    """Return a store for ranks of several hosts: a port of one of them, served by one of them (`serves`) or by others.

    Ranks that meet there again, in the same order, do not see earlier entries.

    Raises:
        StartupError: the port is taken, or cannot be reached.
    """
    try:
        store = _torch.TCPStore(
            address, port, None, serves, timedelta(seconds=join_s), wait_for_workers=False, multi_tenant=True
        )
        meeting = store.add(f"quire.meetings.{rank}", 1)
    except RuntimeError as error:
        raise StartupError(
            f"rank {rank} cannot {'serve' if serves else 'reach'} {address}:{port}, where all ranks meet: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return _torch.PrefixStore(f"quire.{meeting}", store)


def serve_store(address: str) -> Store:
    """Serve a store for `tcp_store` at a free port of this address, as long as it is referenced.

    Raises:
        StartupError: it is none of this host's addresses.
    """
    try:
        return _torch.TCPStore(address, 0, None, True, wait_for_workers=False)
    except RuntimeError as error:
        raise StartupError(f"no store can be served at {address}: {str(error).splitlines()[0]}") from error


def local_address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to another one; sends nothing.

    Raises:
        StartupError: there is no route.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError as error:
        raise StartupError(f"there is no route to {host}, where all ranks meet: {error}") from error


def _meet(rank: int, size: int, store: Store, join_s: float) -> list[tuple[str, int]]:
    """Return each rank's host name and process id, once all have joined."""
    store.set(f"rank.{rank}", f"{os.getpid()} {socket.gethostname()}")
    until, missing = time.monotonic() + join_s, list(range(size))
    while missing := [one for one in missing if not store.check([f"rank.{one}"])]:
        if time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise StartupError(
                f"rank {rank} has waited {join_s:g} s for ranks {names} of {size}, which did not join"
            )
        time.sleep(0.01)
    words = [store.get(f"rank.{one}").decode().split(" ", 1) for one in range(size)]
    return [(host, int(pid)) for pid, host in words]


def _is_done(work: Any) -> bool:
    """Return whether the work is done within POLL_S; raises RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=POLL_S))
    except RuntimeError:  # timeout or failure
        if not work.is_completed():
            return False
        work.wait()
    return True


def _as_bytes(x: Tensor) -> Tensor:
    """Return the memory as bytes, uncopied if x is contiguous; gloo needs no dtype."""
    return x.contiguous().flatten().view(torch.uint8)
