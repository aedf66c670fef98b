"""The description of one step's batch that attention kernels read.

Invariant: it says everything about who owns which rows and blocks, so one op serves prefill, decode and mixed
batches.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each of R requests' T query rows and cached tokens are.

    Request r owns query rows `query_start_loc[r]:query_start_loc[r + 1]`, which are the last of its
    `seq_lens[r]` tokens. Rows past `query_start_loc[R]` are padding. Logical block i of request r is
    `block_tables[r, i]`; entries past the last block a request needs, and those wholly behind a layer's window,
    are never read, so any value may stand there.

    All tensors live on the device of the KV cache.
    """

    query_start_loc: Tensor
    """[R + 1] int32, non-decreasing, starts at 0."""
    seq_lens: Tensor
    """[R] int32: tokens of the request in the cache after this step's keys are written."""
    block_tables: Tensor
    """[R, max_blocks] int32: physical block ids in logical order."""
    slot_mapping: Tensor
    """[T] int64: slot (block_id * block_size + offset) of each row's key and value; negative = none."""
    max_query_len: int
    """Upper bound of the query lengths; exactly 1 means a pure decode batch."""
    max_seq_len: int
    """Upper bound of `seq_lens`, so that no kernel needs to read them back to size its work."""


StepMetadata = tuple[AttentionMetadata, ...]
"""One per KV cache group. They differ in block tables and slots; each layer reads that of its group."""
