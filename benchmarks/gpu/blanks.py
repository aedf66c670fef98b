# SPDX-License-Identifier: Apache-2.0
"""Tensors without memory, of which `benchmarks.gpu.compile` makes the arguments of its launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, StateMetadata
from quire.kernels.linear import PackedWeight, WeightScheme

META = torch.device("meta")
Launch = tuple[str, Callable[[], object]]
"""What is launched, in words, and the call that does it."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def attention_metadata(query_lens: list[int]) -> AttentionMetadata:
    """Requests of so many queries, of any lengths up to 4096."""
    count = len(query_lens)
    return AttentionMetadata(
        query_start_loc=empty(count + 1, dtype=torch.int32),
        seq_lens=empty(count, dtype=torch.int32),
        block_tables=empty(count, 256, dtype=torch.int32),
        slot_mapping=empty(sum(query_lens), dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=4096,
    )


def state_metadata(query_lens: list[int]) -> StateMetadata:
    """The same, of a group that keeps states."""
    step = attention_metadata(query_lens)
    return StateMetadata(
        step.query_start_loc, step.seq_lens, step.block_tables, step.max_query_len, step.max_seq_len, 16
    )


def packed(scheme: WeightScheme, outputs: int, inputs: int, halves: int = 1) -> PackedWeight:
    """A matrix in the layout of GPUs."""
    from quire.kernels.triton import linear

    return linear.pack_weight(empty(outputs, inputs), scheme, halves)
