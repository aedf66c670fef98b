"""What texts' tokens add up to, as a function on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.cpu.calls import call
from quire.kernels.cpu.checks import dtype_code, say
from quire.kernels.pooling import SUM_DTYPE, Accumulated

_CODES: dict[Accumulated, int] = {"sum": 0, "weighted": 1, "max": 2}


def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, reduction: Accumulated) -> None:
    code, wanted = dtype_code("accumulate", "x", x), SUM_DTYPE[reduction]
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"accumulate: x must be rows [T, H]; it is {say(x)}")
    (tokens, size), requests = x.shape, chunks.shape[-1]
    if vectors.shape[1:] != (size,) or vectors.dtype is not wanted or not _is_plain(vectors):
        raise ValueError(
            f"accumulate: vectors must be contiguous {wanted} [S, {size}]; they are {say(vectors)}"
        )
    if chunks.shape != (4, requests) or chunks.dtype is not torch.int64 or not _is_plain(chunks):
        raise ValueError(f"accumulate: chunks must be contiguous int64 [4, R]; they are {say(chunks)}")
    numbers = (requests, tokens, size, x.stride(0), len(vectors), _CODES[reduction], code)
    refused = call("accumulate", (vectors, x, chunks), *numbers)
    if refused:
        raise IndexError(
            f"accumulate: chunk {refused - 1} is none of {tokens} tokens and {len(vectors)} rows"
        )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_cpu
