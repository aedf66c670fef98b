"""Ranks with a device each: what their devices have crosses ranks between these, all else by way of the host.

Invariant: what crosses ranks between devices is put into the order of a device's work, and the host waits for none of
it; so it can be part of a CUDA graph. A rank that is lost is seen by nobody who waits for a device, but by a `Watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from quire.distributed.agreement import check_same_word
from quire.distributed.gloo import Gloo, Store, part_of
from quire.distributed.group import Group
from quire.distributed.nccl import Nccl
from quire.distributed.watch import Watch
from quire.errors import StartupError

_WARM_UP_BYTES = (1, 1 << 12, 1 << 22)
"""What is exchanged at first: libraries choose their ways by size, and connect ranks when one is first taken."""


class DeviceWay(Protocol):
    """Moves tensors between the devices of ranks."""

    device_type: str
    device_name: str
    """Of this rank's, for people."""

    def gather_into(self, out: Tensor, own: Tensor) -> None:
        """Write every rank's bytes [n] behind one another into `out` [ranks * n], behind what was launched before.

        Raises:
            RuntimeError: that is impossible, as after `abort`.
        """

    def send(self, own: Tensor, to: int) -> None:
        """Give bytes [n] to another rank, which takes them by `recv_into`; what is launched later waits until it does.

        Raises:
            RuntimeError: see `gather_into`.
        """

    def recv_into(self, out: Tensor, source: int) -> None:
        """Write what another rank sends into `out` [n], behind what was launched before.

        Raises:
            RuntimeError: see `gather_into`.
        """

    def abort(self) -> None:
        """Have the device wait for nobody any more, from any thread; what it computes then is worth nothing."""

    def close(self) -> None:
        """Let go of what the device has for this; twice is fine."""


class DeviceGroup(Group):
    """The ranks of another group, by which tensors of the host go.

    What only replicas that share experts do, an exchange of tensors of a device, goes that way, too, and the host waits
    for it.
    """

    def __init__(self, group: Group, way: DeviceWay, watch: Watch) -> None:
        super().__init__(group.rank, group.size, group.names)
        self._group, self._way, self._watch = group, way, watch

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if not self._is_of_device(x):
            return self._group.all_gather(x)
        self.check_nobody_lost()
        every = x.new_empty((self.size, *x.shape))
        if x.numel():
            with self._losses(rank for rank in range(self.size) if rank != self.rank):
                self._way.gather_into(_as_bytes(every), _as_bytes(x.contiguous()))
        return list(every.unbind())

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        on = parts[0].device
        return [part.to(on) for part in self._group.all_to_all([part.cpu() for part in parts])]

    def send(self, x: Tensor, to: int) -> None:
        if not self._is_of_device(x):
            self._group.send(x, to)
            return
        self.check_peer(to)
        self.check_nobody_lost()
        with self._losses([to]):
            self._way.send(_as_bytes(x.contiguous()), to)

    def recv(self, out: Tensor, source: int) -> None:
        if not self._is_of_device(out):
            self._group.recv(out, source)
            return
        self.check_peer(source)
        self.check_nobody_lost()
        with self._losses([source]):
            self._way.recv_into(_as_bytes(out), source)

    def close(self, reason: str = "it has ended") -> None:
        self._watch.close()
        self._way.close()
        self._group.close(reason)

    def why_not_captured(self) -> str | None:
        return None

    def check_nobody_lost(self) -> None:
        if self._watch.lost is not None:
            rank, how = self._watch.lost
            raise self.loss_of([rank], f"its process {how}")

    def warm_up(self) -> None:
        """Exchange something with all, and with neighbours, so that nothing is left to be set up when steps begin.

        Raises:
            StartupError: the devices cannot be joined.
        """
        try:
            for num_bytes in _WARM_UP_BYTES:
                own = torch.zeros(num_bytes, dtype=torch.uint8, device=self._way.device_type)
                every = own.new_empty(self.size * num_bytes)
                self._way.gather_into(every, own)
                if self.rank > 0:
                    self._way.recv_into(own, self.rank - 1)
                if self.rank < self.size - 1:
                    self._way.send(own, self.rank + 1)
                every[-1:].cpu()  # waits for the device
        except RuntimeError as error:
            self.check_nobody_lost()
            raise StartupError(
                f"the ranks' devices cannot be joined: {str(error).splitlines()[0]}"
            ) from error

    def _is_of_device(self, x: Tensor) -> bool:
        return x.device.type == self._way.device_type

    @contextmanager
    def _losses(self, peers: Iterable[int]) -> Iterator[None]:
        """What cannot be launched is the loss of one of these."""
        try:
            yield
        except RuntimeError as error:
            self.check_nobody_lost()
            raise self.loss_of(peers, str(error).splitlines()[0]) from error


def _as_bytes(x: Tensor) -> Tensor:
    """Its memory [n], which is contiguous."""
    return x.flatten().view(torch.uint8)


WAYS: dict[str, Callable[[int, int, Store], DeviceWay]] = {"cuda": Nccl}
"""Type of device, as torch names it -> what joins those of ranks that meet at a store."""


def join_devices(group: Gloo, store: Store, device_type: str) -> Group:
    """The ranks of a group, whose devices are joined by whatever there is for their type.

    Raises:
        StartupError: they cannot be, or are not alike: each rank samples by itself, from what all have.
    """
    way = WAYS[device_type](group.rank, group.size, part_of(store, device_type))
    watch = Watch(group.silent, way.abort)
    joined = DeviceGroup(group, way, watch)
    try:
        advice = "CUDA_VISIBLE_DEVICES can name those that are alike"
        check_same_word(group, "kind of device", way.device_name, advice)
        joined.warm_up()
    except BaseException:
        watch.close()
        way.close()
        raise
    return joined
