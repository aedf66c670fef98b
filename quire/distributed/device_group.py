# SPDX-License-Identifier: Apache-2.0
"""Ranks with a device each: device tensors cross between the devices, all others through the host.

Invariant of `DeviceGroup`: device transfers are enqueued on the device, and the host does not wait for them, so they
can be part of a CUDA graph. Waiting for a device does not reveal a lost rank; a `RankWatchdog` does.

`NcclTransport`: torch's NCCL (RCCL on ROCm). No global state of torch.distributed is touched, and no
failure ends the process.

Invariant of `RankWatchdog`: a loss is recorded before pending work is aborted for it, so the waiting caller finds it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from quire.distributed.gloo import Gloo, Store, prefix_store
from quire.distributed.group import Group, check_same_word
from quire.errors import StartupError
from quire.processes import STOPPED

logger = logging.getLogger(__name__)

_torch: Any = torch.distributed  # torch's types do not declare its exports

# torch's watchdog would end the process and name the waiting rank.
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NEVER = timedelta(days=365)
_TAG = 0  # Tags are not needed: transfers are ordered.


class NcclTransport:
    """NCCL transport of this process's current CUDA device; see `DeviceTransport`.

    Args:
        store: where the ranks, which have met there, find each other's devices.

    Raises:
        StartupError: torch was built without NCCL.
    """

    device_type = "cuda"

    def __init__(self, rank: int, size: int, store: Any) -> None:
        if not _torch.is_nccl_available():
            raise StartupError("several ranks on CUDA devices need NCCL, which this torch was built without")
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        self._open: list[Any] = [_torch.ProcessGroupNCCL(store, rank, size, options)]
        self._in_order = _torch.distributed_c10d.AllgatherOptions()
        self._in_order.asyncOp = False  # in the caller's stream, as kernels are
        self.device_name: str = torch.cuda.get_device_name()

    def gather_into(self, out: Tensor, own: Tensor) -> None:
        self._open[0]._allgather_base(out, own, self._in_order).wait()

    def send(self, own: Tensor, to: int) -> None:
        self._open[0].send([own], to, _TAG).wait()

    def recv_into(self, out: Tensor, source: int) -> None:
        self._open[0].recv([out], source, _TAG).wait()

    def abort(self) -> None:
        for group in self._open:
            group.abort()

    def close(self) -> None:
        while self._open:
            self._open.pop().abort()


POLL_S = 0.5
STOPPED_POLLS = 10  # Consecutive polls after which a stopped process is given up.


class RankWatchdog:
    """Watchdog thread for lost ranks; runs until one is lost or it is closed.

    Args:
        silent: returns rank -> reason for ranks that cannot run, as from `why_silent`.
        break_off: aborts pending work; called once, when a rank is lost.

    Attributes:
        lost: lost rank and reason; None while all are alive.
    """

    def __init__(
        self, silent: Callable[[], Mapping[int, str]], break_off: Callable[[], None], poll_s: float = POLL_S
    ) -> None:
        self._silent, self._abort_collective, self._poll_s = silent, break_off, poll_s
        self.lost: tuple[int, str] | None = None
        self._stopped: dict[int, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-rank-losses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; waits for an abort in progress."""
        self._closed.set()
        self._thread.join()

    def poll(self) -> tuple[int, str] | None:
        """Poll all ranks once; returns a lost rank and the reason."""
        found = self._silent()
        self._stopped = {
            rank: self._stopped.get(rank, 0) + 1 for rank, how in found.items() if how == STOPPED
        }
        for rank, how in found.items():
            if how != STOPPED or self._stopped[rank] >= STOPPED_POLLS:
                return rank, how
        return None

    def _run(self) -> None:
        while not self._closed.wait(self._poll_s):
            self.lost = self.poll()
            if self.lost is not None:
                logger.info("rank %d: its process %s", *self.lost)
                self._abort_collective()
                return


# Sizes of the first transfers: libraries choose algorithms by size and connect ranks on first use.
_WARM_UP_BYTES = (1, 1 << 12, 1 << 22)


class DeviceTransport(Protocol):
    """Transport of tensors between the devices of ranks."""

    device_type: str
    device_name: str  # Name of this rank's device.

    def gather_into(self, out: Tensor, own: Tensor) -> None:
        """Gather every rank's bytes [n] into `out` [ranks * n], after all work launched before.

        Raises:
            RuntimeError: it is impossible, as after `abort`.
        """

    def send(self, own: Tensor, to: int) -> None:
        """Send bytes [n] to another rank's `recv_into`; work launched later waits for it.

        Raises:
            RuntimeError: see `gather_into`.
        """

    def recv_into(self, out: Tensor, source: int) -> None:
        """Receive bytes from another rank into `out` [n], after all work launched before.

        Raises:
            RuntimeError: see `gather_into`.
        """

    def abort(self) -> None:
        """Abort pending transfers, from any thread; later device results are invalid."""

    def close(self) -> None:
        """Free the device's resources; may be called twice."""


class DeviceGroup(Group):
    """Group of ranks with a device transport; host tensors use the wrapped group.

    All-to-all of device tensors (expert parallel replicas) also goes through the host, synchronously.
    """

    def __init__(self, group: Group, transport: DeviceTransport, watch: RankWatchdog) -> None:
        super().__init__(group.rank, group.size, group.names)
        self._group, self._transport, self._watch = group, transport, watch

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if not self._is_of_device(x):
            return self._group.all_gather(x)
        self.check_all_alive()
        every = x.new_empty((self.size, *x.shape))
        if x.numel():
            with self._losses(rank for rank in range(self.size) if rank != self.rank):
                self._transport.gather_into(_as_bytes(every), _as_bytes(x.contiguous()))
        return list(every.unbind())

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        on = parts[0].device
        return [part.to(on) for part in self._group.all_to_all([part.cpu() for part in parts])]

    def send(self, x: Tensor, to: int) -> None:
        if not self._is_of_device(x):
            self._group.send(x, to)
            return
        self.check_peer(to)
        self.check_all_alive()
        with self._losses([to]):
            self._transport.send(_as_bytes(x.contiguous()), to)

    def recv(self, out: Tensor, source: int) -> None:
        if not self._is_of_device(out):
            self._group.recv(out, source)
            return
        self.check_peer(source)
        self.check_all_alive()
        with self._losses([source]):
            self._transport.recv_into(_as_bytes(out), source)

    def close(self, reason: str = "it has ended") -> None:
        self._watch.close()
        self._transport.close()
        self._group.close(reason)

    def why_not_captured(self) -> str | None:
        return None

    def check_all_alive(self) -> None:
        if self._watch.lost is not None:
            rank, how = self._watch.lost
            raise self.lost_error([rank], f"its process {how}")

    def warm_up(self) -> None:
        """Transfer test data between all ranks, and between neighbors, so that steps need no setup.

        Raises:
            StartupError: the devices cannot be joined.
        """
        try:
            for num_bytes in _WARM_UP_BYTES:
                own = torch.zeros(num_bytes, dtype=torch.uint8, device=self._transport.device_type)
                every = own.new_empty(self.size * num_bytes)
                self._transport.gather_into(every, own)
                if self.rank > 0:
                    self._transport.recv_into(own, self.rank - 1)
                if self.rank < self.size - 1:
                    self._transport.send(own, self.rank + 1)
                every[-1:].cpu()  # waits for the device
        except RuntimeError as error:
            self.check_all_alive()
            raise StartupError(
                f"the ranks' devices cannot be connected: {str(error).splitlines()[0]}"
            ) from error

    def _is_of_device(self, x: Tensor) -> bool:
        return x.device.type == self._transport.device_type

    @contextmanager
    def _losses(self, peers: Iterable[int]) -> Iterator[None]:
        """Convert a failed launch into the loss of one of these peers."""
        try:
            yield
        except RuntimeError as error:
            self.check_all_alive()
            raise self.lost_error(peers, str(error).splitlines()[0]) from error


def _as_bytes(x: Tensor) -> Tensor:
    """Return the contiguous tensor's memory as bytes [n]."""
    return x.flatten().view(torch.uint8)


# torch device type -> transport
TRANSPORTS: dict[str, Callable[[int, int, Store], DeviceTransport]] = {"cuda": NcclTransport}


def join_devices(group: Gloo, store: Store, device_type: str) -> Group:
    """Join the devices of a group's ranks.

    Raises:
        StartupError: they cannot be joined or differ in kind: each rank samples by itself and must get equal logits.
    """
    transport = TRANSPORTS[device_type](group.rank, group.size, prefix_store(store, device_type))
    watch = RankWatchdog(group.silent, transport.abort)
    joined = DeviceGroup(group, transport, watch)
    try:
        advice = "CUDA_VISIBLE_DEVICES can name those that are alike"
        check_same_word(group, "kind of device", transport.device_name, advice)
        joined.warm_up()
    except BaseException:
        watch.close()
        transport.close()
        raise
    return joined
