"""Memory on pages of 2 MiB: reading all over it then misses the processor's table of pages far less often.

Invariant: asking changes where bytes lie and how fast they are read, and nothing else. Only Linux listens.
"""

from math import prod

import torch
from torch import Tensor

from quire.kernels.cpu import library

HUGE_PAGE = 2 * 2**20


def prefer_huge_pages(tensor: Tensor) -> None:
    """For a tensor's memory, which must be contiguous; best before it is written for the first time."""
    loaded = library.loaded()
    if loaded is not None:
        loaded.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


def matrix_memory(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor of that shape that begins with a huge page if it has room for one.

    A matrix of a little over 2 MiB that begins anywhere else holds no whole one. What is skipped is never touched.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return like.new_empty(shape, dtype=dtype)
    memory = like.new_empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes].view(dtype).view(shape)


def in_matrix_memory(tensor: Tensor) -> Tensor:
    """The same numbers in such memory; a small tensor stays where it is."""
    if tensor.nbytes < HUGE_PAGE:
        return tensor
    return matrix_memory(tensor, *tensor.shape, dtype=tensor.dtype).copy_(tensor)
