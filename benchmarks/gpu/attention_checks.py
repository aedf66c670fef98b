# SPDX-License-Identifier: Apache-2.0
"""Checks of paged attention in every launch shape: prompts, mixed steps, decode with and without splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_checks import LIMITS, WINDOWED, differs, name_of, randn, relative_error
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_05B, TINY, Shape
from benchmarks.gpu.target import Target
from quire.kernels import attention_backends, ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.triton import attention
from tests.kernels.op_cases import make_metadata, move

Batch = list[tuple[int, int]]
BLOCK_SIZE = 16
_BATCHES: dict[str, Batch] = {
    "prompts": [(1500, 1500), (37, 37)],
    "mixed": [(1, 900), (300, 1201), (1, 33), (17, 17)],
    "decode of 1": [(1, 3001)],
    "decode of 100": [(1, 37 + 29 * i) for i in range(100)],
}
_TINY_BATCHES: dict[str, Batch] = {
    "prompts": [(20, 20), (3, 3)],
    "mixed": [(1, 20), (7, 31)],
    "decode of 1": [(1, 40)],
    "decode of 100": [(1, 9), (1, 33)],
}


@dataclass(frozen=True)
class Call:
    """Arguments of one call of `ops.paged_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    features: dict[str, Any]

    def by(self, function: Any) -> Tensor:
        out: Tensor = function(self.q, self.k_cache, self.v_cache, self.metadata, self.scale, **self.features)
        return out


def checks(target: Target) -> Iterator[Check]:
    """Each batch in each shape; precisions other than the main one for the first shape only."""
    first, others = (TINY, []) if target.tiny else (LLAMA_8B, [QWEN_05B])
    for shape in (first, *others, WINDOWED[target.tiny]):
        for dtype in target.dtypes if shape == first else (target.main_dtype,):
            for name in _BATCHES:
                run = partial(_batch, target, shape, dtype, name)
                yield Check(name_of(shape, f"attention, {name}", dtype), run, LIMITS[dtype])
    main = target.main_dtype
    slopes = 2.0 ** -torch.arange(1, first.heads + 1, device=target.device)
    more = {
        "ALiBi": {"alibi_slopes": slopes},
        "sinks in chunks": {"sinks": 8 * slopes, "attention_chunk": 700},
    }
    for name, features in more.items():
        run = partial(_batch, target, first, main, "mixed", features)
        yield Check(name_of(first, f"attention, {name}", main), run, LIMITS[main])
    run = partial(_sdpa, target, first)
    yield Check(name_of(first, "attention by torch_sdpa", main), run, LIMITS[main])
    for name in ("mixed", "decode of 1"):
        run = partial(_batch, target, first, main, name, cache_dtype=torch.float8_e4m3fn)
        yield Check(name_of(first, f"attention, {name}, fp8 cache", main), run, LIMITS[main])
    for shape in (first, WINDOWED[target.tiny]):
        run = partial(_invariant, target, shape)
        yield Check(name_of(shape, "attention, batch-invariant bits", main), run)


def make_call(
    target: Target, shape: Shape, dtype: torch.dtype, batch: Batch, cache_dtype: torch.dtype | None = None
) -> Call:
    """Random queries over random caches."""
    torch.manual_seed(0)
    num_blocks = sum(-(-seq_len // BLOCK_SIZE) for _, seq_len in batch) + 1
    metadata: AttentionMetadata = move(make_metadata(batch, BLOCK_SIZE, num_blocks), str(target.device))
    tokens = sum(query_len for query_len, _ in batch)
    sizes = (num_blocks, shape.kv_heads, BLOCK_SIZE, shape.head_size)
    keys, values = (randn(target, *sizes, dtype=dtype, seed=seed).to(cache_dtype or dtype) for seed in (1, 2))
    q = randn(target, tokens, shape.heads, shape.head_size, dtype=dtype)
    features = {"sliding_window": shape.window, "soft_cap": shape.soft_cap}
    return Call(q, keys.transpose(2, 3), values, metadata, shape.head_size**-0.5, features)


def _batch(
    target: Target,
    shape: Shape,
    dtype: torch.dtype,
    name: str,
    features: Mapping[str, Any] = MappingProxyType({}),
    cache_dtype: torch.dtype | None = None,
) -> float:
    call = make_call(target, shape, dtype, _batches(target)[name], cache_dtype)
    call = replace(call, features=call.features | dict(features))
    return relative_error(call.by(attention.paged_attention), call.by(ops.paged_attention.oracle))


def _batches(target: Target) -> dict[str, Batch]:
    return _TINY_BATCHES if target.tiny else _BATCHES


def _sdpa(target: Target, shape: Shape) -> float:
    call = make_call(target, shape, target.main_dtype, _batches(target)["mixed"])
    return relative_error(call.by(attention_backends.paged_attention), call.by(ops.paged_attention.oracle))


def _invariant(target: Target, shape: Shape) -> float:
    """A prompt at once, in chunks, and its last tokens one by one in batches of several sizes."""
    length, cut = (40, 20) if target.tiny else (2600, 1100)
    whole = make_call(target, shape, target.main_dtype, [(length, length)])
    expected = whole.by(attention.invariant_paged_attention)
    different = 0.0
    for start, end, copies in [
        (0, cut, 1),
        (cut, length, 1),
        (length - 1, length, 1),
        (length - 1, length, 9),
    ]:
        part = _part(whole, start, end, copies)
        for got in part.by(attention.invariant_paged_attention).split(end - start):
            different += differs(got, expected[start:end])
    return different


def _part(whole: Call, start: int, end: int, copies: int) -> Call:
    """Queries start to end of a request, `copies` times in one batch over the same blocks."""
    device = whole.q.device
    metadata = replace(
        whole.metadata,
        query_start_loc=torch.arange(copies + 1, dtype=torch.int32, device=device) * (end - start),
        seq_lens=torch.full((copies,), end, dtype=torch.int32, device=device),
        block_tables=whole.metadata.block_tables.repeat(copies, 1),
        slot_mapping=whole.metadata.slot_mapping[start:end].repeat(copies),
        max_query_len=end - start,
        max_seq_len=end,
    )
    return replace(whole, q=whole.q[start:end].repeat(copies, 1, 1), metadata=metadata)
