"""Rows of a table of which each rank has some, looked up by all."""

from collections.abc import Callable

from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops


def looked_up_among(
    group: Group | None, own: slice, ids: Tensor, look_up: Callable[[Tensor], Tensor]
) -> Tensor:
    """The rows [T, H] of tokens [T], each from the rank of the group that has it.

    Args:
        own: the tokens that this rank has.
        look_up: gives the rows of tokens, counted from the first of its own.
    """
    if group is None:
        return look_up(ids)
    local = ids - own.start
    foreign = (local < 0) | (local >= own.stop - own.start)
    # -0.0, which the others add, changes no number, not even 0.0.
    rows = look_up(local.masked_fill(foreign, 0)).masked_fill(foreign[:, None], -0.0)
    return ops.all_reduce(rows, group)
