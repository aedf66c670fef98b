# SPDX-License-Identifier: Apache-2.0
"""Launches of `benchmarks.gpu.compile` for sparse models: experts, latent attention, layers with a state.

The sizes are those of Qwen3-30B-A3B's experts, DeepSeek-V3's routing and attention, and the layers of Mamba 2.8B,
Mamba 2 2.7B, Qwen3-Next-80B-A3B and RecurrentGemma-2B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.blanks import Launch, attention_metadata, empty, packed, state_metadata
from quire.config.arch import Routing
from quire.kernels.experts import ExpertWeights
from quire.kernels.linear import WeightScheme

SCHEMES = {
    "float": WeightScheme(fast=False),
    "int8": WeightScheme("int8"),
    "int4": WeightScheme("int4", 32),
    "int4 with zero points": WeightScheme("int4", 128, symmetric=False),
    "fp8": WeightScheme("fp8"),
}
STEPS = {"a prompt": [700, 30], "decode": [1] * 8}


def launches() -> Iterator[Launch]:
    """Every kernel of those kinds."""
    yield from _routing()
    yield from _experts()
    yield from _latents()
    for what, query_lens in STEPS.items():
        yield from _states(what, query_lens)


def _routing() -> Iterator[Launch]:
    from quire.kernels.triton import experts

    routings = {
        "softmax": (Routing(8, normalized=True), 128),
        "sigmoids in groups": (
            Routing(8, "sigmoid", groups=8, top_groups=4, group_members=2, normalized=True, scale=2.5),
            256,
        ),
        "sparsemixer": (Routing(2, "sparsemixer", reach=0.02), 16),
    }
    for name, (routing, count) in routings.items():
        bias = empty(count, dtype=torch.float32) if "groups" in name else None
        yield f"route, {name}", partial(experts.route, empty(5, count), bias, routing)


def _experts() -> Iterator[Launch]:
    from quire.kernels.triton import experts

    count, hidden, inner = 128, 2048, 768
    for name, scheme in SCHEMES.items():
        gate_up, down = packed(scheme, 2 * inner, hidden, 2), packed(scheme, hidden, inner)
        of = ExpertWeights((gate_up,) * count, (down,) * count)
        for tokens in (1, 700):
            yield f"{name} experts, {tokens} tokens", partial(experts.experts, *_routed(tokens, hidden), of)
    biases = [(empty(size, dtype=torch.float32),) * count for size in (2 * inner, hidden)]
    biased = replace(of, gate_up_bias=biases[0], down_bias=biases[1], activation="clamped_swiglu")
    yield "fp8 experts with biases", partial(experts.experts, *_routed(1, hidden), biased)


def _routed(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 8 experts each."""
    return empty(tokens, hidden), empty(tokens, 8, dtype=torch.int32), empty(tokens, 8, dtype=torch.float32)


def _latents() -> Iterator[Launch]:
    from quire.kernels.triton import latent

    heads, rank, rope = 128, 512, 64
    for name, scheme in SCHEMES.items():
        weight = packed(scheme, heads * rank, 128)
        yield f"{name} matrices of heads", partial(latent.per_head_linear, empty(40, heads, 128), weight)
    cache, table = empty(100, 16, rank + rope), empty(4096, rope, dtype=torch.float32)
    ids, rows = empty(5, dtype=torch.int64), empty(5, rank + rope)
    for interleaved in (False, True):
        arguments = ids, empty(5, heads, rope), rows, empty(rank), table, cache, ids, 1e-6, interleaved
        yield f"write_latents, interleaved: {interleaved}", partial(latent.write_latents, *arguments)
    for count in (heads, 16):
        for what, query_lens in ({"decode, 256": [1] * 256} | STEPS).items():
            tokens, step = sum(query_lens), attention_metadata(query_lens)
            q, q_rope = empty(tokens, count, rank), empty(tokens, count, rope)
            run = partial(latent.latent_attention, q, q_rope, cache, step, 0.1)
            yield f"latent_attention, {count} heads, {what}", run


def _states(what: str, query_lens: list[int]) -> Iterator[Launch]:
    from quire.kernels.triton import recurrence, scan

    rows, step = sum(query_lens), state_metadata(query_lens)
    wide = partial(empty, dtype=torch.float32)
    x, of_channels = empty(rows, 5120), wide(5120)
    yield (
        f"causal_conv, {what}",
        partial(scan.causal_conv, x, wide(4, 5120), of_channels, wide(9, 3, 5120), step, True),
    )
    b, dt, heads = empty(rows, 16), empty(rows, 80), wide(80)
    arguments = x, x, wide(16, 5120), b, b, of_channels, x, wide(9, 16, 5120), step
    yield f"selective_scan, {what}", partial(scan.selective_scan, *arguments)
    b = empty(rows, 128)
    kept = wide(9, 80, 128, 64)
    yield f"ssd_scan, {what}", partial(scan.ssd_scan, x, dt, heads, b, b, heads, heads, None, kept, step)
    qkv, ba, heads = empty(rows, 2 * 2048 + 4096), empty(rows, 64), wide(32)
    kept = wide(9, 32, 128, 128)
    yield f"gated_delta, {what}", partial(recurrence.gated_delta, qkv, ba, heads, heads, kept, step)
    qkv, ba = empty(rows, 3 * 4096), empty(rows, 32 + 4096)
    by_channel = partial(recurrence.gated_delta, qkv, ba, heads, wide(4096), kept, step)
    yield f"gated_delta by channels, {what}", by_channel
    parts, of_heads = [empty(rows, 2048) for _ in range(5)], wide(5, 2048)
    yield f"rwkv7, {what}", partial(recurrence.rwkv7, *parts, of_heads, wide(9, 32, 64, 64), step, 64e-5)
    gates, channels = wide(10, 256, 512), wide(2560)
    arguments = empty(rows, 2560), gates, wide(10, 512), channels, wide(9, 2560), step
    yield f"rg_lru, {what}", partial(recurrence.rg_lru, *arguments)
