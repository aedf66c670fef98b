# SPDX-License-Identifier: Apache-2.0
"""Batch metadata that kernels read: one for each KV cache group, of the group's kind; and sampling limits of a batch.

Invariant: it completely describes which rows and blocks belong to which request, so one op serves prefill, decode and
mixed batches. Attention features beyond softmax(q k) v are validated here, for all implementations alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingLimits(NamedTuple):
    """Sampling limits in use: whether any row of the settings of `ops.sample_tokens` has one.

    The host computes it when it stages a step, so that the device's settings need not be read back. True is always
    right; False for all rows saves a GPU the search.
    """

    min_p: bool = True
    top_k: bool = True
    top_p: bool = True


NO_LIMITS = SamplingLimits(min_p=False, top_k=False, top_p=False)
ANY_LIMITS = SamplingLimits()


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Assignment of T query rows, and of a group's blocks, to R requests.

    Request r owns query rows `query_start_loc[r]:query_start_loc[r + 1]`, which are the last of its `seq_lens[r]`
    tokens. Rows past `query_start_loc[R]` are padding. Logical block i of request r is `block_tables[r, i]`; entries
    past the last required block, and those that no layer of the group reads any more, are never read and may hold
    anything.

    All tensors are on the device of the KV cache.
    """

    query_start_loc: Tensor
    """[R + 1] int32, non-decreasing, starts at 0."""
    seq_lens: Tensor
    """[R] int32: tokens of the request that are in the cache after this step."""
    block_tables: Tensor
    """[R, max_blocks] int32: physical block ids in logical order."""
    max_query_len: int
    """Upper bound of the query lengths; exactly 1, with as many rows as requests, means a pure decode batch: row r is
    request r's, and a request of length 0 is padding.
    """
    max_seq_len: int
    """Upper bound of `seq_lens`, so that no kernel needs to read them back to size its grid."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata(GroupMetadata):
    """Metadata of a group whose blocks hold something for each token, such as keys and values."""

    slot_mapping: Tensor
    """[T] int64: destination slot (block_id * block_size + offset) of each row's key and value; negative = none."""
    last_seen: Tensor | None = None
    """[T] int32: last position that each row attends to, at least its own and at most the request's last; ascending
    within a request, or equal. None: its own.
    """


@dataclass(frozen=True, slots=True)
class StateMetadata(GroupMetadata):
    """Metadata of a group whose blocks hold states, each after all tokens up to the end of its block.

    `RecurrentStateSpec` says which table entries a request's tokens [c, e) read a state from and write states to. e is
    the request's `kept`; its query rows are [c, e) followed by draft tokens, which write no state. Block 0 never holds
    a state.
    """

    block_size: int
    """Tokens per block."""
    kept_lens: Tensor | None = None
    """[R] int32: tokens of each request without drafts; None: there are no drafts."""

    @property
    def kept(self) -> Tensor:
        """[R] int32: number of tokens before the last written state."""
        return self.seq_lens if self.kept_lens is None else self.kept_lens


def check_features(
    q: Tensor,
    sliding_window: int | None,
    attention_chunk: int | None,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None = None,
) -> None:
    """Check options for queries [T, Hq, D].

    Raises:
        ValueError: a window or chunk below 1, both of them, a soft cap that is not above 0, slopes or sinks that are
            not [Hq] floats on q's device, or biases that are not float32 [Hq, odd] there.
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
    if relative_bias is not None:
        _check_biases(q, relative_bias, "paged_attention")


def check_last_seen(metadata: AttentionMetadata, num_rows: int, attention_chunk: int | None) -> None:
    """Check the shape and dtype of `last_seen`, for `num_rows` queries.

    Raises:
        ValueError: it is not [num_rows] int32, or there is an attention chunk.
    """
    last_seen = metadata.last_seen
    if last_seen is None:
        return
    if attention_chunk is not None:
        raise ValueError("paged_attention: there may be a last_seen or an attention_chunk, not both")
    if last_seen.dtype is not torch.int32 or last_seen.shape != (num_rows,):
        found = f"{last_seen.dtype} {list(last_seen.shape)}"
        raise ValueError(f"paged_attention: last_seen must be int32 [{num_rows}]; it is {found}")


def check_bidirectional(
    q: Tensor, window: int | None, alibi_slopes: Tensor | None, relative_bias: Tensor | None
) -> None:
    """Check options of bidirectional attention, as `check_features`.

    Raises:
        ValueError: a window below 1, slopes that are not [Hq] floats on q's device, or biases that are not float32
            [Hq, odd] there.
    """
    op = "bidirectional_attention"
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be 1 or more; it is {window}")
    if alibi_slopes is not None:
        _check_of_heads(q, "alibi_slopes", alibi_slopes, op)
    if relative_bias is not None:
        _check_biases(q, relative_bias, op)


def _check_biases(q: Tensor, relative_bias: Tensor, op: str) -> None:
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
