"""Ranks that are processes, by torch's gloo: over the loopback on one host, over the network between hosts.

Invariant: no global state of torch.distributed is touched, so a process may be in several groups.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from quire.distributed.beats import SILENCE_S, Beats
from quire.distributed.group import ANSWER_S, Group
from quire.distributed.outbox import Outbox
from quire.errors import RankLostError, StartupError
from quire.processes import STOPPED, why_silent

LOOK_S = 1.0
"""How long a process whose connections are closed may take to be seen as gone, and between two looks at one that is
waited for."""
LOOKS_AT_STOPPED = 5
"""In turn, before a process that is stopped is given up."""

_TAG_OF_NOTHING = 1
"""Under which nobody sends."""

_torch: Any = torch.distributed
"""Whose types do not say what it exports."""
Store = Any
"""`torch.distributed.Store`."""


class Gloo(Group):
    """One process of a group.

    Args:
        store: where the ranks find each other, such as `torch.distributed.FileStore` or `torch.distributed.TCPStore`.
        address: of this host, as the others reach it.
        join_s: how long to wait for the others to come.
        beats: signs of life of ranks of other hosts; without them a host sees to its own ranks, and what keeps others
            waiting is seen after `answer_s`.

    Raises:
        StartupError: not all ranks came; the message names those that did not.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        address: str = "127.0.0.1",
        join_s: float = 60.0,
        answer_s: float = ANSWER_S,
        names: Sequence[int] | None = None,
        beats: Beats | None = None,
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
        # Its threads let go of tensors, for which they want the interpreter: they must have ended before it does.
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
        """Ranks of this host whose processes can do nothing, and why, as `why_silent` says it."""
        found = {rank: why_silent(self._processes[rank][1]) for rank in self._here()}
        return {rank: how for rank, how in found.items() if how is not None}

    def host_of(self, rank: int) -> str:
        """What a rank's host calls itself."""
        return self._processes[rank][0]

    def close(self, reason: str = "it has ended") -> None:
        self._end()
        if self._beats is not None:
            self._beats.close()

    @property
    def _group(self) -> Any:
        """Which nobody asks for once it is closed."""
        return self._open[0]

    def _wait(self, start: Callable[[], Any]) -> None:
        """Until it is done. Who sends and receives is waited for as long as it takes, be it stopped."""
        try:
            start().wait()
        except RuntimeError as error:
            raise self._loss(str(error).splitlines()[0]) from error

    def _wait_for_all(self, start: Callable[[], Any]) -> None:
        """Until it is done, or another process has been stopped for a while."""
        looks = 0
        try:
            work = start()
            while not _is_done(work):
                stopped = [rank for rank in self._here() if why_silent(self._processes[rank][1]) == STOPPED]
                looks = looks + 1 if stopped else 0
                if looks >= LOOKS_AT_STOPPED:
                    self._break_off(stopped[0])
                if silent := self._silent_elsewhere(SILENCE_S):
                    self._break_off(silent[0])
        except RuntimeError as error:
            raise self._loss(str(error).splitlines()[0]) from error

    def _break_off(self, rank: int) -> None:
        """End what is under way, on all ranks: gloo does so when a message that is waited for does not come in time."""
        nothing = torch.empty(1, dtype=torch.uint8)
        self._group.recv([nothing], rank, _TAG_OF_NOTHING).wait(timedelta(milliseconds=1))

    def _loss(self, said: str) -> RankLostError:
        """Who has gone; those of other hosts cannot be looked at, so all that give no signs of life may be."""
        until = time.monotonic() + LOOK_S
        while True:
            gone = [rank for rank in self._here() if why_silent(self._processes[rank][1])]
            gone += self._silent_elsewhere(SILENCE_S / 2)
            if gone or time.monotonic() > until:
                return self.loss_of(gone or self._others(), said)
            time.sleep(0.02)

    def _here(self) -> list[int]:
        return [rank for rank in self._others() if self._processes[rank][0] == socket.gethostname()]

    def _silent_elsewhere(self, seconds: float) -> list[int]:
        """Ranks of other hosts that give no signs of life, as far as there are any."""
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


def part_of(store: Store, name: str) -> Store:
    """For a group of some of those who meet there."""
    return _torch.PrefixStore(name, store)


def file_store(path: Path, size: int) -> Store:
    """Where ranks of one host meet: a file, which need not be there yet."""
    return _torch.FileStore(str(path), size)


def tcp_store(address: str, port: int, rank: int, *, serves: bool, join_s: float) -> Store:
    """Where ranks of several hosts meet: a port of one of them, at which one of them `serves`, or somebody else.

    Ranks that meet there again, in the same order, do not see what was said before.

    Raises:
        StartupError: the port is taken, or nobody answers there.
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
    """Where others meet by `tcp_store`, at a free port of this address, as long as it is kept.

    Raises:
        StartupError: it is none of this host's addresses.
    """
    try:
        return _torch.TCPStore(address, 0, None, True, wait_for_workers=False)
    except RuntimeError as error:
        raise StartupError(f"no store can be served at {address}: {str(error).splitlines()[0]}") from error


def address_towards(host: str, port: int) -> str:
    """That of this host, as another one sees it; nothing is sent.

    Raises:
        StartupError: there is no way there.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError as error:
        raise StartupError(f"there is no way to {host}, where all ranks meet: {error}") from error


def _meet(rank: int, size: int, store: Store, join_s: float) -> list[tuple[str, int]]:
    """Each rank's host and process."""
    store.set(f"rank.{rank}", f"{os.getpid()} {socket.gethostname()}")
    until, missing = time.monotonic() + join_s, list(range(size))
    while missing := [one for one in missing if not store.check([f"rank.{one}"])]:
        if time.monotonic() > until:
            names = ", ".join(map(str, missing))
            raise StartupError(
                f"rank {rank} has waited {join_s:g} s for ranks {names} of {size}, which did not come"
            )
        time.sleep(0.01)
    words = [store.get(f"rank.{one}").decode().split(" ", 1) for one in range(size)]
    return [(host, int(pid)) for pid, host in words]


def _is_done(work: Any) -> bool:
    """Whether it is, soon; raises RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:  # in vain, or that it has failed
        if not work.is_completed():
            return False
        work.wait()
    return True


def _as_bytes(x: Tensor) -> Tensor:
    """The same memory, if x is contiguous: gloo need not know the type of what it moves."""
    return x.contiguous().flatten().view(torch.uint8)
