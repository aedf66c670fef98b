"""What crosses ranks through memory that they share, as functions on tensors, with every check."""

import math

from torch import Tensor

from quire.distributed.shared_memory import SharedMemory
from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import dtype_code, say


def all_reduce(x: Tensor, group: SharedMemory) -> Tensor:
    code = dtype_code("all_reduce", "x", x)
    x = x.contiguous()
    out = empty(x, *x.shape)
    _cross("all_reduce", (out, x), group, x.numel(), code)
    return out


def all_gather(x: Tensor, group: SharedMemory, dim: int = -1) -> Tensor:
    dtype_code("all_gather", "x", x)
    shape = list(x.shape)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"all_gather: x has no dimension {dim}; it is {say(x)}")
    dim %= len(shape)
    x = x.contiguous()
    out = empty(x, *shape[:dim], group.size * shape[dim], *shape[dim + 1 :])
    rows = math.prod(shape[:dim])
    _cross("all_gather", (out, x), group, rows, x.nbytes // rows if rows else 0)
    return out


def _cross(name: str, tensors: tuple[Tensor, Tensor], group: SharedMemory, *numbers: int) -> None:
    """Raises RankLostError where another rank does not come."""
    lost = call(name, (*tensors, group.memory), group.rank, *numbers)
    if lost:
        raise group.loss(lost - 1)
