"""The descriptions of one step's batch that kernels read: one for each KV cache group, of the group's kind.

Invariant: it says everything about who owns which rows and blocks, so one op serves prefill, decode and mixed
batches. What a model may ask of attention beyond softmax(q k) v is checked here, for every implementation alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Which of T query rows, and which blocks of a group, belong to each of R requests.

    Request r owns query rows `query_start_loc[r]:query_start_loc[r + 1]`, which are the last of its
    `seq_lens[r]` tokens. Rows past `query_start_loc[R]` are padding. Logical block i of request r is
    `block_tables[r, i]`; entries past the last block a request needs, and those that no layer of the group reads any
    more, are never read, so any value may stand there.

    All tensors live on the device of the KV cache.
    """

    query_start_loc: Tensor
    """[R + 1] int32, non-decreasing, starts at 0."""
    seq_lens: Tensor
    """[R] int32: tokens of the request of which the cache has something after this step."""
    block_tables: Tensor
    """[R, max_blocks] int32: physical block ids in logical order."""
    max_query_len: int
    """Upper bound of the query lengths; exactly 1, with as many rows as requests, means a pure decode batch: row r is
    that of request r, and a request of length 0 is padding."""
    max_seq_len: int
    """Upper bound of `seq_lens`, so that no kernel needs to read them back to size its work."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata(GroupMetadata):
    """A group whose blocks hold something for each token, such as keys and values."""

    slot_mapping: Tensor
    """[T] int64: slot (block_id * block_size + offset) where each row's key and value go; negative = none."""


@dataclass(frozen=True, slots=True)
class StateMetadata(GroupMetadata):
    """A group whose blocks hold states, each that of all tokens up to the end of its block.

    `RecurrentStateSpec` says which entry of its table a request's tokens [c, e) start from, and in which they leave a
    state; e is what `kept` says of the request, and its query rows are [c, e) and drafts behind them, which leave none.
    Block 0 is no place for a state.
    """

    block_size: int
    """Tokens of a block."""
    kept_lens: Tensor | None = None
    """[R] int32: tokens of each request that are no drafts; None: nobody has drafts."""

    @property
    def kept(self) -> Tensor:
        """[R] int32: how many tokens the last state is left behind."""
        return self.seq_lens if self.kept_lens is None else self.kept_lens


def check_features(
    q: Tensor,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Refuse options that mean nothing for queries [T, Hq, D].

    Raises:
        ValueError: a window or chunk below 1, both of them, a soft cap that is not above 0, or slopes or sinks that are
            not [Hq] floats beside q.
    """
    for name, size in (("sliding_window", sliding_window), ("attention_chunk", attention_chunk)):
        if size is not None and size < 1:
            raise ValueError(f"paged_attention: {name} must be 1 or more; it is {size}")
    if sliding_window is not None and attention_chunk is not None:
        raise ValueError("paged_attention: there may be a sliding_window or an attention_chunk, not both")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"paged_attention: soft_cap must be above 0; it is {soft_cap}")
    for name, numbers in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is not None:
            _check_of_heads(q, name, numbers)


def check_bidirectional(
    q: Tensor, window: int | None, alibi_slopes: Tensor | None, relative_bias: Tensor | None
) -> None:
    """As `check_features`, for attention in both directions.

    Raises:
        ValueError: a window below 1, slopes that are not [Hq] floats beside q, or biases that are no float32 [Hq, odd]
            there.
    """
    op = "bidirectional_attention"
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be 1 or more; it is {window}")
    if alibi_slopes is not None:
        _check_of_heads(q, "alibi_slopes", alibi_slopes, op)
    if relative_bias is None:
        return
    shape = relative_bias.shape
    fits = len(shape) == 2 and shape[0] == q.shape[1] and shape[1] % 2 == 1
    if not fits or relative_bias.dtype is not torch.float32 or relative_bias.device != q.device:
        found = f"{relative_bias.dtype} {list(shape)} on {relative_bias.device}"
        raise ValueError(
            f"{op}: relative_bias must be float32 [{q.shape[1]}, 2 * P - 1] on {q.device}; it is {found}"
        )


def _check_of_heads(q: Tensor, name: str, numbers: Tensor, op: str = "paged_attention") -> None:
    if numbers.shape != q.shape[1:2] or not numbers.is_floating_point() or numbers.device != q.device:
        found = f"{numbers.dtype} {list(numbers.shape)} on {numbers.device}"
        raise ValueError(f"{op}: {name} must be floats [{q.shape[1]}] on {q.device}; they are {found}")
