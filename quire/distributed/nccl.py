"""CUDA devices of several processes, by torch's NCCL; where torch is ROCm's, RCCL answers to the same name.

Invariant: no global state of torch.distributed is touched, and nothing here ends the process: who is lost is found out
by others (`Watch`), who name them.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from quire.errors import StartupError

_torch: Any = torch.distributed
"""Whose types do not say what it exports."""

_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Torch's own watch would end the process after a while, which names the rank that waited."""
_NEVER = timedelta(days=365)
_TAG = 0
"""What arrives needs no name."""


class Nccl:
    """See `DeviceWay`; of this process's current CUDA device.

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
        self._in_order.asyncOp = False  # in the stream of whoever calls, as kernels are
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
