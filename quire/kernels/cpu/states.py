"""What the C++ kernels of layers with a state are told of a step, with every check."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu.checks import say


class StateArguments(NamedTuple):
    """Arguments of a kernel that reads and replaces states, in their order."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """query_start_loc, seq_lens, those of them that are no drafts, and block_tables."""
    sizes: tuple[int, int, int, int, int]
    """Rows, requests, entries of a table, tokens of a block, blocks of the cache."""
    stride: int
    """Floats from the state of one block to that of the next."""


def check_states(
    op: str, states: Tensor, shape: tuple[int, ...], rows: int, metadata: StateMetadata
) -> StateArguments:
    """Of a step of so many rows; `states` [blocks, *shape] float32, each block's in one piece."""
    fits = states.dim() == 1 + len(shape) and states.shape[1:] == shape
    if not fits or not states[:1].is_contiguous() or not states.is_cpu or states.dtype is not torch.float32:
        raise ValueError(
            f"{op}: states must be float32 [blocks, {', '.join(map(str, shape))}] on the CPU, each block's contiguous; "
            f"they are {say(states)}"
        )
    tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.kept, metadata.block_tables)
    starts, lengths, kept, tables = tensors
    of_requests = tables.dim() == 2 and lengths.shape == kept.shape == tables.shape[:1]
    if not of_requests or starts.shape != (len(lengths) + 1,):
        shapes = ", ".join(map(say, tensors))
        raise ValueError(f"{op}: metadata must be [R + 1], [R], [R] and [R, blocks]; it is {shapes}")
    for tensor in tensors:
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{op}: metadata must be contiguous int32; it has {say(tensor)}")
    sizes = (rows, *tables.shape, metadata.block_size, len(states))
    return StateArguments(tensors, sizes, states.stride(0))


def bad_request(op: str, metadata: StateMetadata, request: int, num_blocks: int) -> str:
    """What is wrong with a step of which a kernel refuses a request, or its bounds if there is no such request."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"{op}: query_start_loc {starts} does not fit the rows"
    drafts = lengths[request] - int(metadata.kept[request])
    tokens = f"{lengths[request]} tokens" + (f", {drafts} of them drafts," if drafts else "")
    return (
        f"{op}: request {request} with rows [{starts[request]}, {starts[request + 1]}), {tokens} and blocks "
        f"{metadata.block_tables[request].tolist()} does not fit the rows or the cache of {num_blocks} blocks"
    )
