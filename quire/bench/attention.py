"""Attention as a kernel measurement: decode over a long context, and prefill.

Invariant: blocks are scattered over a pool that is larger than the caches, and calls take turns over all of it, so what
a decode step reads comes from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from quire.bench.case import Case
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata

_POOL_BYTES = 96 * 2**20
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model."""

    q_heads: int
    kv_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.size}"


SHAPES = (AttentionShape(14, 2, 64), AttentionShape(32, 8, 128))
"""Of Qwen 2 with half a billion parameters, and of Llama 3 with eight billion."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CONTEXTS = (512, 4096)
BATCHES = (1, 16)
PROMPTS = (512, 2048)


def attention_cases() -> Iterator[Case]:
    """Decode steps of some batches and contexts, then prompts, for all cache types."""
    for shape in SHAPES:
        for name, dtype in DTYPES.items():
            for context in CONTEXTS:
                for batch in BATCHES:
                    yield attention_case(f"decode@{context} {shape} {name}", shape, dtype, batch, 1, context)
            for prompt in PROMPTS:
                yield attention_case(f"prefill {shape} {name}", shape, dtype, 1, prompt, prompt)


def attention_case(
    name: str, shape: AttentionShape, dtype: torch.dtype, batch: int, queries: int, context: int
) -> Case:
    """A batch of requests with the same numbers of queries and of cached tokens, the queries included."""
    blocks_each = -(-context // _BLOCK_SIZE)
    stored = shape.size + (4 if dtype == torch.int8 else 0)
    block_bytes = 2 * shape.kv_heads * _BLOCK_SIZE * stored * dtype.itemsize
    turns = max(1, _POOL_BYTES // (batch * blocks_each * block_bytes))
    keys, values = _pool(turns * batch * blocks_each, shape.kv_heads, stored, dtype)
    order = torch.randperm(len(keys), dtype=torch.int32)
    turn = cycle([_metadata(table, queries, context) for table in order.view(turns, batch, blocks_each)])
    q = torch.randn(batch * queries, shape.q_heads, shape.size)
    pairs = batch * sum(range(context - queries + 1, context + 1))
    return Case(
        name=name,
        rows=batch * queries,
        run=lambda: ops.paged_attention(q, keys, values, next(turn), shape.size**-0.5),
        flops=4.0 * pairs * shape.q_heads * shape.size,
        num_bytes=batch * blocks_each * block_bytes + 2.0 * q.nbytes,
    )


def _pool(blocks: int, heads: int, stored: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values, all alike. The bytes of an int8 one read as a scale of 0.01, too."""
    fill = 0x3C if dtype == torch.int8 else 0.5
    return (
        torch.full((blocks, heads, stored, _BLOCK_SIZE), fill, dtype=dtype),
        torch.full((blocks, heads, _BLOCK_SIZE, stored), fill, dtype=dtype),
    )


def _metadata(tables: Tensor, queries: int, context: int) -> AttentionMetadata:
    batch = len(tables)
    return AttentionMetadata(
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((batch,), context, dtype=torch.int32),
        block_tables=tables.contiguous(),
        slot_mapping=torch.full((batch * queries,), -1),
        max_query_len=queries,
        max_seq_len=context,
    )
