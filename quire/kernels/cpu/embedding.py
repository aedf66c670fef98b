"""Rows of a plain table as a function on tensors, with every check."""

from torch import Tensor

from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import check_index, dtype_code, say


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    check_index("embedding", "ids", ids, ids.shape[0] if ids.dim() else 0)
    dtype_code("embedding", "weight", weight)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"embedding: weight must be contiguous [V, H]; it is {say(weight)}")
    (tokens,), (rows, size) = ids.shape, weight.shape
    out = empty(weight, tokens, size)
    refused = call("embedding", (out, ids, weight), tokens, rows, size * weight.itemsize)
    if refused:
        raise IndexError(f"embedding: {refused} ids are outside the table of {rows} rows")
    return out
