# SPDX-License-Identifier: Apache-2.0
"""Arguments for every op, by op name, and the comparison of an implementation with its oracle on them."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import cycle
from typing import Any, get_args

import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.distributed.group import ALONE, Group
from quire.distributed.shared_memory import share_memory
from quire.kernels import ops, reference
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, StateMetadata
from quire.kernels.experts import SUM_DTYPE, ExpertAdapters, ExpertWeights, with_scales_alike
from quire.kernels.linear import (
    FLOAT,
    GATED,
    Function,
    FusedActivation,
    PackedWeight,
    QuantizedRows,
    RowQuantization,
    WeightScheme,
)
from quire.kernels.low_rank import LowRankStacks
from quire.lora.modules import quantize_adapter
from tests.kernels.state_batches import state_batch

TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1.6e-2, 4e-3), torch.float16: (2e-3, 1e-3)}
FUNCTIONS: tuple[Function, ...] = get_args(Function)
E4M3_STEP = (0.126, 2.0**-9)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[torch.dtype], Iterator[Arguments]]] = {}


def cases(
    function: Callable[[torch.dtype], Iterator[Arguments]],
) -> Callable[[torch.dtype], Iterator[Arguments]]:
    CASES[function.__name__] = function
    return function


@cases
def rms_norm(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 64), (3, 1), (5, 77), (2, 3, 40), (129, 512), (1, 4099)]:
        for weight_dtype in {dtype, torch.float32}:
            yield (randn(*shape, dtype=dtype), randn(shape[-1], dtype=weight_dtype), 1e-6), {}
    heads_of_fused_qkv = randn(6, 8 * 24, dtype=dtype)[:, 24:96].view(6, 3, 24)
    yield (heads_of_fused_qkv, randn(24, dtype=dtype), 1e-5), {}


@cases
def fused_add_rms_norm(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 64), (5, 77), (2, 3, 40), (129, 512)]:
        yield (randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1]), 1e-6), {}
    yield (randn(4, 80, dtype=dtype)[:, 3:40], randn(4, 37, dtype=dtype), randn(37, dtype=dtype), 1e-6), {}


@cases
def layer_norm(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 64), (5, 77), (2, 3, 40)]:
        yield (randn(*shape, dtype=dtype), randn(shape[-1]), randn(shape[-1]), 1e-5), {}
        yield (randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype), None, 1e-5), {}


@cases
def fused_add_layer_norm(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 64), (5, 77), (2, 3, 40), (129, 512)]:
        x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
        yield (x, residual, randn(shape[-1]), randn(shape[-1]), 1e-5), {}
        yield (x, residual, randn(shape[-1], dtype=dtype), None, 1e-5), {}
    yield (randn(4, 80, dtype=dtype)[:, 3:40], randn(4, 37, dtype=dtype), randn(37), None, 1e-6), {}


@cases
def accumulate(dtype: torch.dtype) -> Iterator[Arguments]:
    x = randn(60, 77, dtype=dtype)
    x[4, 3] = torch.nan
    chunks = torch.tensor([[3, 0, 6, 1], [0, 40, 41, 20], [0, 5, 0, 0], [9, 1, 19, 11]])
    for reduction, sums in SUM_DTYPE.items():
        for tokens in (x, x[:, 40:], randn(60, 3, dtype=dtype)):
            yield (randn(8, tokens.shape[1]).to(sums), tokens, chunks), {"reduction": reduction}
        yield (randn(8, 77).to(sums), x, chunks[:, :0].contiguous()), {"reduction": reduction}


@cases
def activate(dtype: torch.dtype) -> Iterator[Arguments]:
    extremes = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 3e4, -3e4, torch.nan], dtype=dtype)
    for function in FUNCTIONS:
        for shape in [(0, 64), (1, 1), (5, 77), (2, 3, 40), (3, 4099)]:
            yield (3 * randn(*shape, dtype=dtype),), {"function": function}
        yield (extremes,), {"function": function}
        yield (randn(6, 90, dtype=dtype)[:, 3:40],), {"function": function}


@cases
def round_rows(dtype: torch.dtype) -> Iterator[Arguments]:
    ways = [
        RowQuantization("int8"),
        RowQuantization("int8", lowest=-127),
        RowQuantization("int8", symmetric=False),
        RowQuantization("int8", group=32),
        RowQuantization("int8", scale=0.03),
        RowQuantization("int8", scale=0.02, zero=-7.0),
        RowQuantization("e4m3"),
        RowQuantization("e4m3", group=128),
        RowQuantization("e4m3", bound=1.5),
        RowQuantization("e4m3", scale=0.004),
    ]
    small = torch.logspace(-12, 3, 200).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    for way in ways:
        for shape in [(0, 64), (1, 1), (5, 77), (2, 3, 40), (3, 4099)]:
            yield (3 * randn(*shape, dtype=dtype),), {"rounding": way}
        yield (randn(6, 90, dtype=dtype)[:, 3:40],), {"rounding": way}
        yield (small.to(dtype),), {"rounding": way}
        yield (torch.zeros(2, 40, dtype=dtype),), {"rounding": way}
        yield (torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, 1.0, 0.0]], dtype=dtype),), {"rounding": way}


@cases
def silu_and_mul(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 2), (1, 64), (5, 154), (2, 3, 40), (17, 2 * 4099)]:
        yield (5 * randn(*shape, dtype=dtype),), {}
    extremes = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 3e4, -3e4, torch.inf, torch.nan], dtype=dtype
    )
    yield (torch.cat([extremes, torch.ones_like(extremes)]).unsqueeze(0),), {}


@cases
def gelu_and_mul(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 64), (5, 154), (2, 3, 40)]:
        for approximate in ("none", "tanh"):
            yield (randn(*shape, dtype=dtype),), {"approximate": approximate}


@cases
def rms_norm_fp8(dtype: torch.dtype) -> Iterator[Arguments]:
    for args, _ in rms_norm(dtype):
        if args[0].dim() == 2:
            yield args, {}
    zeros = torch.zeros(2, 40, dtype=dtype)
    yield (zeros, randn(40, dtype=dtype), 1e-6), {}
    yield (randn(4, 80, dtype=dtype)[:, 3:40], randn(37, dtype=dtype), 1e-6), {}


@cases
def fused_add_rms_norm_fp8(dtype: torch.dtype) -> Iterator[Arguments]:
    for args, _ in fused_add_rms_norm(dtype):
        if args[0].dim() == 2:
            yield args, {}


@cases
def silu_and_mul_fp8(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 64), (1, 2), (1, 64), (5, 154), (17, 2 * 4099)]:
        yield (5 * randn(*shape, dtype=dtype),), {}
    yield (randn(4, 90, dtype=dtype)[:, 10:],), {}


@cases
def gelu_and_mul_fp8(dtype: torch.dtype) -> Iterator[Arguments]:
    for args, options in gelu_and_mul(dtype):
        if args[0].dim() == 2:
            yield args, options


@cases
def rotary_embedding(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, q_heads, k_heads, size, rot_dim in [
        (0, 4, 2, 16, 16),
        (1, 3, 1, 20, 6),
        (7, 8, 2, 64, 64),
        (40, 28, 4, 128, 66),
        (5, 3, 0, 24, 24),
    ]:
        qkv = randn(tokens, (q_heads + 2 * k_heads) * size, dtype=dtype)
        q = qkv[:, : q_heads * size].view(tokens, q_heads, size)
        k = qkv[:, q_heads * size : (q_heads + k_heads) * size].view(tokens, k_heads, size)
        positions = torch.randint(0, 50, (tokens,))
        for interleaved in (False, True):
            yield (positions, q, k, randn(50, rot_dim)), {"interleaved": interleaved}


@cases
def write_kv(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, block_size, size in [(0, 2, 4, 8), (1, 1, 16, 5), (9, 3, 4, 24)]:
        slots = torch.randperm(6 * block_size)[:tokens]
        slots[1::3] = -1
        kv = randn(tokens, 2, heads, size, dtype=dtype)
        for cache_dtype in (dtype, torch.float32):
            yield (kv[:, 0], kv[:, 1], *randn_caches(6, heads, block_size, size, cache_dtype), slots), {}
    slots = torch.tensor([7, -1, 0, 22])
    kv = randn(4, 2, 2, 24, dtype=dtype)
    kv[2, :, 1] = 0
    yield (kv[:, 0], kv[:, 1], *int8_caches(6, 2, 4, 24), slots), {}
    kv[1, 0, 1, 5] = torch.nan
    given = torch.tensor([[0.02, 0.0003], [0.004, 1.5]])  # of which some are too small for what is scaled
    yield (kv[:, 0], kv[:, 1], *int8_caches(6, 2, 4, 24), slots), {"scales": given}


@cases
def rotary_and_write_kv(dtype: torch.dtype) -> Iterator[Arguments]:
    for positions, q, k, cos_sin_cache in (args for args, _ in rotary_embedding(dtype)):
        tokens, heads, size = k.shape
        if not heads:
            continue
        slots = torch.randperm(16 * 4)[:tokens]
        slots[1::3] = -1
        caches = randn_caches(16, heads, 4, size, dtype)
        arguments = (
            positions,
            q,
            k,
            randn(tokens, heads, size, dtype=dtype),
            cos_sin_cache,
            *caches,
            slots,
        )
        for interleaved in (False, True):
            yield arguments, {"interleaved": interleaved}
            for norm_dtype in {dtype, torch.float32}:
                norms = randn(size, dtype=norm_dtype), randn(size, dtype=norm_dtype)
                yield (*arguments, interleaved, *norms, 1e-5), {}
        if not size % 4:
            caches = int8_caches(16, heads, 4, size)
            scales = 0.03 * torch.rand(2, heads) + 0.001
            yield (*arguments[:5], *caches, slots), {"scales": scales}


BATCHES = [[], [(1, 1)], [(1, 9), (1, 33), (1, 16)], [(5, 5), (1, 20), (17, 40)], [(0, 3), (3, 7)]]
"""Each of (query length, sequence length)."""


def last_seen(batch: list[tuple[int, int]], size: int) -> Tensor:
    """Every row of a batch sees the whole run of `size` positions that it stands in, as far as there are tokens."""
    ends = [
        min(position // size * size + size, length) - 1
        for count, length in batch
        for position in range(length - count, length)
    ]
    return torch.tensor(ends, dtype=torch.int32)


@cases
def paged_attention(dtype: torch.dtype) -> Iterator[Arguments]:
    features = [
        {},
        {"sliding_window": 6},
        {"soft_cap": 3.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
        {"attention_chunk": 7, "sinks": torch.tensor([-1.0, 0.5, 2.0, 9.0])},
        {"relative_bias": randn(4, 2 * 40 - 1)},
    ]
    for batch in BATCHES:
        for feature in features:
            metadata = make_metadata(batch, block_size=8, num_blocks=16)
            caches = randn_caches(16, 2, 8, 24, dtype)
            tokens = sum(query_len for query_len, _ in batch)
            yield (randn(tokens, 4, 24, dtype=dtype), *caches, metadata, 24**-0.5), feature
            if "attention_chunk" not in feature:
                seeing = replace(metadata, last_seen=last_seen(batch, 6))
                yield (randn(tokens, 4, 24, dtype=dtype), *caches, seeing, 24**-0.5), feature


@cases
def bidirectional_attention(dtype: torch.dtype) -> Iterator[Arguments]:
    features = [
        {},
        {"window": 5},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
        {"relative_bias": randn(4, 2 * 40 - 1), "window": 9},
    ]
    for lengths in ([], [1], [9, 33, 16], [0, 40, 3]):
        metadata = make_metadata([(length, length) for length in lengths], block_size=64, num_blocks=4)
        qkv = randn(sum(lengths) + 2, 4 + 2 + 2, 24, dtype=dtype)  # two rows are of no request
        for feature in features:
            yield (*qkv.split([4, 2, 2], 1), metadata, 24**-0.5), feature


@cases
def embedding(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens in (0, 1, 13):
        yield (torch.randint(0, 31, (tokens,)), randn(31, 20, dtype=dtype)), {}


@cases
def linear(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape, outputs in [((0, 16), 8), ((1, 16), 8), ((7, 45), 33), ((2, 3, 64), 10)]:
        yield (randn(*shape, dtype=dtype), randn(outputs, shape[-1], dtype=dtype)), {}
        yield (
            (randn(*shape, dtype=dtype), randn(outputs, shape[-1], dtype=dtype), randn(outputs, dtype=dtype)),
            {},
        )


FLOATS = [FLOAT, replace(FLOAT, fast=True)]
INTEGERS = [
    WeightScheme(kind, group_size, symmetric, fast)
    for kind, groups in (("int8", (0, 16, 32)), ("int4", (0, 16, 32, 128)))
    for group_size in groups
    for symmetric in (True, False)
    for fast in (True, False)
] + [
    WeightScheme("int4", group_size, False, fast, two_level=True)
    for group_size, fast in ((16, True), (32, False), (32, True), (128, True))
]
OTHERS = [
    *(
        WeightScheme(kind, group_size)
        for kind, group_size in (("e2m1", 16), ("nf4", 64), ("iq4_nl", 32), ("fp4", 0))
    ),
    *(
        WeightScheme(kind, group_size, fast=False)
        for kind, group_size in (("e2m1", 32), ("nf4", 64), ("fp8", 0))
    ),
    WeightScheme("fp8", 128, fast=False),
    WeightScheme("int6", 16),
    WeightScheme("int6", 32, symmetric=False),
    WeightScheme("int6", 16, fast=False),
]
SCHEMES = [*FLOATS, *OTHERS, *INTEGERS]


def schemes(dtype: torch.dtype) -> list[WeightScheme]:
    """All with float32; with others, of the integers every fifth: each kind, symmetric and not, fast and not."""
    return SCHEMES if dtype == torch.float32 else [*FLOATS, *OTHERS, *INTEGERS[::5]]


@cases
def pack_weight(dtype: torch.dtype) -> Iterator[Arguments]:
    for scheme in schemes(dtype):
        for shape in [(1, 1), (33, 45), (16, 128), (50, 301)]:
            yield (randn(*shape, dtype=dtype), scheme), {}
        yield (randn(38, 70, dtype=dtype), scheme), {"halves": 2}


@cases
def packed_linear(dtype: torch.dtype) -> Iterator[Arguments]:
    functions = cycle(FUNCTIONS)
    for scheme in schemes(dtype):
        for shape, outputs in [((0, 16), 8), ((1, 16), 8), ((7, 45), 34), ((2, 3, 64), 10), ((40, 600), 66)]:
            for weight_dtype in {dtype, torch.float32} if scheme in FLOATS else {torch.float32}:
                rows = (randn(outputs, shape[-1]) * shape[-1] ** -0.5).to(weight_dtype)
                weight = reference.pack_weight(rows, scheme, 2)
                yield (randn(*shape, dtype=dtype), weight), {}
                yield (
                    (randn(*shape, dtype=dtype), weight, randn(outputs)),
                    {"activation": "silu_and_mul"},
                )
                yield (randn(*shape, dtype=dtype), weight, randn(outputs)), {"dtype": torch.float32}
                yield (randn(*shape, dtype=dtype), weight), {"activation": "clamped_swiglu"}
                alone = reference.pack_weight(rows, scheme)
                yield (randn(*shape, dtype=dtype), alone, randn(outputs)), {"activation": next(functions)}


@cases
def rounded_linear(dtype: torch.dtype) -> Iterator[Arguments]:
    ways = [
        RowQuantization("int8"),
        RowQuantization("int8", scale=0.03),
        RowQuantization("int8", symmetric=False),
        RowQuantization("int8", scale=0.03, zero=4.0),
        RowQuantization("int8", group=32),
        RowQuantization("e4m3"),
    ]
    kept = [WeightScheme("int8", fast=fast) for fast in (True, False)] + [WeightScheme("int4", 32)]
    for scheme, way in itertools.product(kept, ways):
        for shape, outputs, halves in [
            ((0, 16), 8, 1),
            ((1, 16), 8, 2),
            ((2, 3, 64), 10, 1),
            ((40, 600), 66, 2),
        ]:
            rows = randn(outputs, shape[-1]) * shape[-1] ** -0.5
            weight = reference.pack_weight(rows, scheme, halves)
            if way.shifts and scheme.is_plain_int8:
                weight = weight.with_code_sums()
            yield (randn(*shape, dtype=dtype), weight), {"rounding": way}
            yield (randn(*shape, dtype=dtype), weight), {"rounding": way, "bias": randn(outputs)}


@cases
def packed_embedding(dtype: torch.dtype) -> Iterator[Arguments]:
    for scheme in schemes(dtype):
        for tokens in (0, 1, 13):
            weight = reference.pack_weight(randn(31, 45, dtype=dtype), scheme)
            yield (torch.randint(0, 31, (tokens,)), weight), {}


ROUTINGS = [
    (Routing(1), 5),
    (Routing(2, normalized=True), 8),
    (Routing(8, normalized=True), 64),
    (Routing(4, scores="sigmoid"), 13),
    (Routing(3, groups=4, top_groups=2), 16),
    (Routing(3, "sigmoid", groups=4, top_groups=2, group_members=2, normalized=True, scale=2.5), 24),
    (Routing(3, "sparsemixer", reach=0.7, scale=2.0), 16),
]
"""Each with a number of experts."""


@cases
def route(dtype: torch.dtype) -> Iterator[Arguments]:
    for routing, count in ROUTINGS:
        for rows in (0, 1, 7, 40):
            logits = randn(rows, count, dtype=dtype)
            yield (logits, None, routing), {}
            if routing.scores != "sparsemixer":
                yield (logits, torch.rand(count), routing), {}


EXPERTS = [(5, 2, 130, 70), (1, 1, 16, 8), (8, 3, 45, 33)]
"""Experts, those of a token, hidden and inner size; the first, of several groups, for every scheme."""


@cases
def experts(dtype: torch.dtype) -> Iterator[Arguments]:
    # What is between two products that round their activations may differ by a step, so those are left to test_experts.
    for number, scheme in enumerate(scheme for scheme in schemes(dtype) if not scheme.fast):
        for count, top_k, hidden, inner in EXPERTS if number % 3 == 0 else EXPERTS[:1]:
            of = random_experts(count, hidden, inner, scheme, dtype)
            bounded = replace(of, activation="clamped_swiglu")
            ungated = random_experts(count, hidden, inner, scheme, dtype, activation="relu2")
            for tokens in (0, 1, 2, 70):
                chosen = torch.rand(tokens, count).argsort(1)[:, :top_k].int()
                yield (randn(tokens, hidden, dtype=dtype), chosen, torch.rand(tokens, top_k), of), {}
                yield (randn(tokens, hidden, dtype=dtype), chosen, torch.rand(tokens, top_k), ungated), {}
                yield (
                    (3 * randn(tokens, hidden, dtype=dtype), chosen, torch.rand(tokens, top_k), bounded),
                    {},
                )
                if tokens and number % 3 == 0:
                    adapter_rows = torch.randint(-1, 2, (tokens,), dtype=torch.int32)
                    x, shares = randn(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k)
                    yield (x, chosen, shares, of, adapter_rows, expert_adapters(2, of)), {}


def expert_adapters(num_adapters: int, of: ExpertWeights) -> ExpertAdapters:
    """Random ones of experts."""
    inner, hidden = of.down[0].inputs, of.down[0].outputs
    return ExpertAdapters(
        low_rank_stacks(num_adapters * len(of), [inner, inner], hidden, 16),
        low_rank_stacks(num_adapters * len(of), [hidden], inner, 32),
    )


@cases
def expert_rows(dtype: torch.dtype) -> Iterator[Arguments]:
    """All experts, and those of a rank that has some of them."""
    for scheme in [scheme for scheme in schemes(dtype) if not scheme.fast][:2]:
        for count, top_k, hidden, inner in EXPERTS:
            of = random_experts(count, hidden, inner, scheme, dtype)
            for tokens in (0, 1, 70):
                x, chosen = (
                    randn(tokens, hidden, dtype=dtype),
                    torch.rand(tokens, count).argsort(1)[:, :top_k].int(),
                )
                yield (x, chosen, of), {}
                some = replace(of, first=3, total=count + 4)
                yield (x, (chosen + 3) % (count + 4), some), {}
                if tokens == 70:
                    adapter_rows = torch.randint(-1, 2, (tokens,), dtype=torch.int32)
                    adapters = expert_adapters(2, of)
                    yield (x, (chosen + 3) % (count + 4), some, adapter_rows, adapters), {}


@cases
def add_choices(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, top_k, hidden in [(0, 2, 8), (1, 1, 16), (3, 8, 45), (40, 3, 700)]:
        chosen = torch.rand(tokens, 11).argsort(1)[:, :top_k].int()
        yield (randn(tokens, top_k, hidden), chosen, torch.rand(tokens, top_k)), {}


def random_experts(
    count: int,
    hidden: int,
    inner: int,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    biased: bool = False,
    activation: FusedActivation = "silu_and_mul",
) -> ExpertWeights:
    halves = 2 if activation in GATED else 1

    def matrices(outputs: int, inputs: int, halves: int) -> tuple[PackedWeight, ...]:
        rows = (randn(outputs, inputs) * inputs**-0.5 for _ in range(count))
        packed = [reference.pack_weight(each.to(dtype), scheme, halves) for each in rows]
        return with_scales_alike(packed)

    biases = [tuple(randn(size) for _ in range(count)) if biased else () for size in (halves * inner, hidden)]
    up = matrices(halves * inner, hidden, halves)
    return ExpertWeights(up, matrices(hidden, inner, 1), *biases, activation=activation)


@cases
def per_head_linear(dtype: torch.dtype) -> Iterator[Arguments]:
    for scheme in schemes(dtype):
        for tokens, heads, inputs, outputs in [
            (0, 2, 8, 16),
            (1, 3, 45, 32),
            (7, 4, 130, 16),
            (200, 2, 33, 48),
        ]:
            rows = randn(heads * outputs, inputs, dtype=dtype) * inputs**-0.5
            x = randn(tokens, heads, inputs + 5, dtype=dtype)[..., :inputs]
            yield (x, reference.pack_weight(rows.to(dtype), scheme)), {}


@cases
def write_latents(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, rank, rope in [(0, 2, 16, 8), (1, 3, 32, 8), (9, 4, 50, 6), (40, 16, 512, 64)]:
        slots = torch.randperm(16 * 4)[:tokens]
        slots[1::3] = -1
        q = randn(tokens, heads, 24 + rope, dtype=dtype)[..., 24:]
        rows = randn(tokens, 10 + rank + rope, dtype=dtype)[:, 10:]
        positions, table = torch.randint(0, 50, (tokens,)), randn(50, rope)
        for cache_dtype in (dtype, torch.float32):
            for norm_dtype in {dtype, torch.float32}:
                cache = randn(16, 4, rank + rope, dtype=cache_dtype)
                norm = randn(rank, dtype=norm_dtype)
                for interleaved in (False, True):
                    yield (positions, q, rows, norm, table, cache, slots, 1e-5, interleaved), {}


@cases
def low_rank_linear(dtype: torch.dtype) -> Iterator[Arguments]:
    """No rows, none with an adapter, some alone and in runs; parts of any size, adapters of any rank, 0 included."""
    for inputs, parts, max_rank in [
        (1, [1], 16),
        (45, [33], 16),
        (64, [64, 16, 16], 32),
        (300, [280, 7], 48),
    ]:
        for kept in {dtype, torch.float32, torch.int8}:
            adapters = low_rank_stacks(3, parts, inputs, max_rank, kept)
            for slots in ([], [-1, -1], [2], [0, 0, 2, -1, 1, 1, 1, 1, 1], [2] * 7 + [-7] + [0] * 5):
                rows = torch.tensor(slots, dtype=torch.int32)
                out = randn(len(slots), sum(parts), dtype=dtype)
                yield (out, randn(len(slots), inputs, dtype=dtype), rows, adapters), {}


def low_rank_stacks(
    num_slots: int, parts: list[int], inputs: int, max_rank: int, dtype: torch.dtype = torch.float32
) -> LowRankStacks:
    """Slots full of random adapters; what lies behind an adapter's ranks is NaN, or whatever integers are instead."""
    if dtype is torch.int8:
        return quantize_adapter(low_rank_stacks(num_slots, parts, inputs, max_rank), dtype)
    stacks = LowRankStacks.empty(num_slots, parts, inputs, max_rank, dtype, torch.device("cpu"))
    stacks.scales.copy_(torch.rand(stacks.scales.shape) * 2)
    stacks.ranks.copy_(torch.randint(0, stacks.a.shape[-1] + 1, stacks.ranks.shape))
    stacks.affine.copy_(torch.randint(0, 2, stacks.affine.shape))
    stacks.factors.copy_(torch.rand(stacks.factors.shape) + 0.5)
    stacks.offsets.copy_(torch.randn(stacks.offsets.shape))
    stacks.a.fill_(torch.nan)
    stacks.b.fill_(torch.nan)
    for slot in range(num_slots):
        for part, columns in enumerate(stacks.columns()):
            rank = int(stacks.ranks[slot, part])
            stacks.a[slot, part, :, :rank] = torch.randn(inputs, rank) / inputs**0.5
            stacks.b[slot, :rank, columns] = torch.randn(rank, parts[part]) / 4
    return stacks


@cases
def latent_attention(dtype: torch.dtype) -> Iterator[Arguments]:
    for batch in BATCHES:
        for heads, rank, rope, cache_dtype in [(4, 32, 8, dtype), (5, 16, 24, torch.float32)]:
            metadata = make_metadata(batch, block_size=8, num_blocks=16)
            tokens = sum(query_len for query_len, _ in batch)
            q, q_rope = randn(tokens, heads, rank, dtype=dtype), randn(tokens, heads, 24 + rope, dtype=dtype)
            cache = randn(16, 8, rank + rope, dtype=cache_dtype)
            yield (q, q_rope[..., 24:], cache, metadata, (rank + rope) ** -0.5), {}


@cases
def unusable_rows(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in [(0, 5), (1, 1), (3, 8), (4, 77), (2, 40_000)]:
        logits = randn(*shape)
        yield (logits,), {}
        if logits.numel():
            bad = logits.clone()
            bad[-1, -1], bad[0, 0] = torch.nan, torch.inf
            yield (bad,), {}
            masked = logits.clone()
            masked[0], masked[-1, : logits.shape[1] // 2] = -torch.inf, -torch.inf
            yield (masked,), {}
    yield (torch.full((2, 64), 3e38),), {}


@cases
def clear_rows(dtype: torch.dtype) -> Iterator[Arguments]:
    for cleared in ([], [True], [False, True, False]):
        yield (randn(len(cleared), 33, dtype=dtype), torch.tensor(cleared, dtype=torch.bool)), {}


@cases
def mask_logits(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, vocab_size in (([], 9), ([1], 1), ([2, 0], 32), ([0, 1, 2], 33), ([2, 1], 1003)):
        words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), dtype=torch.int32)
        yield (randn(3, vocab_size), torch.tensor(rows, dtype=torch.int64), words), {}
    for word in (0, -1):
        yield (randn(3, 70), torch.tensor([0, 2]), torch.full((2, 3), word, dtype=torch.int32)), {}


@cases
def apply_penalties(dtype: torch.dtype) -> Iterator[Arguments]:
    for count in (0, 1, 30):
        logits, indices = 3 * randn(4, 23), torch.randperm(4 * 23)[:count]
        factors = torch.rand(count, dtype=torch.float64) * 2 + 1e-300
        yield (logits, indices, factors, torch.randn(count, dtype=torch.float64)), {}
    extremes = torch.tensor([[3e38, -3e38, 0.0, 1.0]])
    for factor in (5e-324, 1.7e308):
        factors = torch.full((4,), factor, dtype=torch.float64)
        yield (extremes, torch.arange(4), factors, torch.zeros(4, dtype=torch.float64)), {}


@cases
def penalize_rows(dtype: torch.dtype) -> Iterator[Arguments]:
    """No users, empty rows and prompts, tokens of one kind only, and several samples of a row, as drafts have them."""
    rows = torch.randint(0, 23, (5, 3000), dtype=torch.int32)
    rows[3] = 7
    for places in ([], [(0, 2, 0, 0)], [(1, 4, 3, 9), (0, 3, 2, 2500), (3, 0, 0, 1030), (2, 0, 5, 5)]):
        numbers = torch.tensor(places, dtype=torch.int64).view(-1, 4)
        factors = torch.rand(len(places), 3, dtype=torch.float64) * 2 - torch.tensor([0.0, 1.0, 1.0])
        factors[:, 0] += 1e-300
        longest = max((place[3] for place in places), default=0)
        yield (3 * randn(4, 23), rows, numbers, factors), {"longest": longest}
    extremes = torch.tensor([[3e38, -3e38, 0.0, 1.0, -torch.inf]])
    of_all, place = torch.arange(5, dtype=torch.int32)[None], torch.tensor([[0, 0, 1, 5]])
    for factor in (5e-324, 1.7e308):
        yield (
            (extremes, of_all, place, torch.tensor([[factor, 0.5, 0.5]], dtype=torch.float64)),
            {"longest": 5},
        )


@cases
def sample_tokens(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, vocab_size in [(0, 9), (5, 1), (40, 17), (40, 1003), (8, 20_011)]:
        yield (3 * randn(rows, vocab_size), settings(rows, vocab_size), random_keys(rows)), {}
        ties = randn(rows, vocab_size).mul_(2).round_()
        ties[ties == 3] = -torch.inf
        yield (ties, settings(rows, vocab_size), random_keys(rows)), {}
    yield (torch.full((2, 9), -torch.inf), settings(2, 9), random_keys(2)), {}
    greedy = torch.tensor([(0.0, -torch.inf, 9, 1.0)], dtype=torch.float64).repeat(3, 1)
    yield (randn(3, 9), greedy, None), {}


def settings(rows: int, vocab_size: int) -> Tensor:
    """For `ops.sample_tokens`; numbers that no sum of simple probabilities hits, so that rounding decides nothing."""
    temperatures, log_min_ps = [0.0, 0.01, 0.7, 1.0, 2.0], [-torch.inf, -torch.inf, -4.4, -1.157, -0.13]
    top_ks = [vocab_size, vocab_size, 1, min(3, vocab_size), min(700, vocab_size)]
    columns = (temperatures, log_min_ps, top_ks, [1.0, 0.012345, 0.71828183, 0.97654321, 0.99999])
    picked = [torch.tensor(column, dtype=torch.float64)[torch.randint(0, 5, (rows,))] for column in columns]
    return torch.stack(picked, dim=1)


def random_keys(rows: int) -> Tensor:
    """Seeds of any 64 bits, and positions: [rows, 2]."""
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 2**40, (rows,))
    return torch.stack([seeds, positions], dim=1)


@cases
def token_logprobs(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, vocab_size in [(0, 9), (3, 1), (6, 17), (3, 1003), (2, 20_011)]:
        for num_top in {0, 1, min(5, vocab_size), min(64, vocab_size), min(65, vocab_size), vocab_size}:
            chosen = torch.randint(0, vocab_size, (rows,))
            yield (3 * randn(rows, vocab_size), chosen), {"num_top": num_top}
            yield (randn(rows, vocab_size).mul_(2).round_(), chosen), {"num_top": num_top}


def state_steps() -> Iterator[StateMetadata]:
    """Prompts and decodes, begun and resumed, at the ends of blocks and across them; no rows, padding, and drafts."""
    rng = random.Random(0)
    yield state_batch([], 4)
    yield state_batch([(0, 1)], 16)
    yield state_batch([(7, 1), (4, 1), (0, 1)], 4)
    yield state_batch([(0, 19), (3, 2), (8, 9), (5, 0), (1, 30)], 4, lambda: rng.random() < 0.5)
    yield state_batch([(6, 3), (0, 2), (8, 1)], 4, num_drafts=[5, 0, 2])
    decodes = state_batch([(0, 1), (6, 1), (12, 1)], 4)
    yield replace(decodes, seq_lens=torch.tensor([1, 0, 13], dtype=torch.int32))


def of_state(step: StateMetadata, *shape: int) -> Tensor:
    """Views of the states of a layer that keeps something else beside them."""
    blocks = 1 + int(step.block_tables.max()) if step.block_tables.numel() else 2
    room = randn(blocks, math.prod(shape) + 16)
    return room[:, 16:].unflatten(1, shape)


@cases
def causal_conv(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for channels, taps, silu in [(8, 4, True), (37, 2, False), (72, 1, False), (5, 5, True)]:
            x = randn(rows, channels + 9, dtype=dtype)[:, 9:]
            bias = randn(channels) if silu else None
            args = (x, randn(taps, channels), bias, of_state(step, taps - 1, channels), step)
            yield args, {"silu": silu}


@cases
def selective_scan(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for channels, count, is_gated in [(8, 16, True), (43, 3, False), (70, 1, True)]:
            dt, b, c = randn(rows, channels + 2 * count, dtype=dtype).split([channels, count, count], 1)
            x, gate = randn(rows, 2 * channels, dtype=dtype).chunk(2, 1)
            vectors = (-randn(count, channels).exp(), b, c, randn(channels))
            yield (x, 4 * dt, *vectors, gate if is_gated else None, of_state(step, count, channels), step), {}


@cases
def ssd_scan(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for heads, count, size, groups in [(4, 16, 8, 2), (3, 5, 11, 1), (2, 9, 40, 2)]:
            widths = [heads * size, groups * count, groups * count, heads]
            x, b, c, dt = randn(rows, sum(widths), dtype=dtype).split(widths, 1)
            gate = randn(rows, heads * size, dtype=dtype) if size == 8 else None
            of_heads = (-randn(heads).exp(), b, c, randn(heads), randn(heads))
            limits = {"time_limits": (0.1, 1.5)} if size == 11 else {}
            states = of_state(step, heads, count, size)
            yield (x, 3 * dt, *of_heads, gate, states, step), {"groups": groups, **limits}


@cases
def gated_delta(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for key_heads, heads, keys, values, steps in [
            (1, 1, 8, 16, 1),
            (2, 4, 16, 48, 1),
            (2, 2, 128, 64, 1),
            (1, 3, 10, 7, 1),
            (2, 4, 16, 48, 16),
            (1, 1, 10, 7, 10),
        ]:
            qkv = randn(rows, 2 * key_heads * keys + heads * values, dtype=dtype)
            of_heads = (-torch.rand(heads), randn(heads * steps))
            states = of_state(step, heads, keys, values)
            options = {"strongest": 2.0} if steps == 16 else {"least": -5.0} if heads in (1, 3) else {}
            yield (qkv, randn(rows, heads * (1 + steps), dtype=dtype), *of_heads, states, step), options


@cases
def rg_lru(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for heads, size in [(1, 8), (2, 40), (3, 72), (2, 5)]:
            x, gates = randn(rows, heads * size, dtype=dtype), randn(heads, size, 2 * size) * size**-0.5
            of_heads = (gates, randn(heads, 2 * size), -8 * torch.rand(heads * size))
            yield (x, *of_heads, of_state(step, heads * size), step), {}


@cases
def rwkv7(dtype: torch.dtype) -> Iterator[Arguments]:
    for step in state_steps():
        rows = int(step.query_start_loc[-1])
        for heads, size in [(1, 16), (3, 64), (2, 5)]:
            parts = [randn(rows, heads * size, dtype=dtype) for _ in range(5)]
            of_heads = randn(5, heads * size)
            yield (*parts, of_heads, of_state(step, heads, size, size), step), {"eps": size * 1e-5}


class Mirror(Group):
    """The first of two ranks; the other one does as this one does, with twice the numbers."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self._sent = torch.empty(0)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x, 2 * x]

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0], 2 * parts[0]]

    def send(self, x: Tensor, to: int) -> None:
        self.check_peer(to)

    def recv(self, out: Tensor, source: int) -> None:
        self.check_peer(source)
        out.fill_(2)


@cases
def all_reduce(dtype: torch.dtype) -> Iterator[Arguments]:
    for group in (ALONE, Mirror(), share_memory(ALONE, piece_bytes=64)):
        yield (randn(3, 5, dtype=dtype), group), {}
        yield (randn(0, 5, dtype=dtype), group), {}
        yield (randn(7, 2, 60, dtype=dtype), group), {}


@cases
def all_gather(dtype: torch.dtype) -> Iterator[Arguments]:
    for group in (ALONE, Mirror(), share_memory(ALONE, piece_bytes=64)):
        yield (randn(3, 5, dtype=dtype), group), {}
        yield (randn(3, 5, dtype=dtype), group), {"dim": 0}
        yield (randn(7, 2, 60, dtype=dtype), group), {"dim": 1}


@cases
def all_to_all(dtype: torch.dtype) -> Iterator[Arguments]:
    for group in (ALONE, share_memory(ALONE, piece_bytes=64)):
        yield (randn(3, 5, dtype=dtype), [3], group), {}
        yield (randn(0, 5, dtype=dtype), [0], group), {}
        yield (randn(70, 5, dtype=dtype), [70], group), {}
    yield (randn(3, 5, dtype=dtype), [1, 2], Mirror()), {}
    yield (randn(3, 5, dtype=dtype), [0, 3], Mirror()), {}


@cases
def send(dtype: torch.dtype) -> Iterator[Arguments]:
    yield (randn(3, 5, dtype=dtype), Mirror(), 1), {}


@cases
def recv(dtype: torch.dtype) -> Iterator[Arguments]:
    yield (randn(3, 5, dtype=dtype), Mirror(), 1), {}


def compare(
    op: ops.Op[..., Any],
    function: Callable[..., Any],
    dtype: torch.dtype,
    device: str,
    accepts: Callable[..., bool] | None = None,
) -> None:
    """Both functions on clones of each case's arguments: equal results, equal effects on the arguments."""
    for number, arguments in enumerate(cases_of(op.name, dtype)):
        args, kwargs = move(arguments, device)
        if accepts is not None and not accepts(*args, **kwargs):
            continue
        result = function(*args, **kwargs)
        wanted = told_by_the_oracle(op.name, dtype, device, number)
        for got, want in zip(tensors((result, (args, kwargs))), wanted, strict=True):
            close(got, want, dtype)


@functools.cache
def cases_of(name: str, dtype: torch.dtype) -> list[Arguments]:
    """Made once, as is what the oracle tells of each: that takes longer than all implementations."""
    torch.manual_seed(0)
    return list(CASES[name](dtype))


@functools.cache
def told_by_the_oracle(name: str, dtype: torch.dtype, device: str, number: int) -> list[Tensor]:
    """Return the oracle's results for a case, and the arguments as the oracle leaves them."""
    args, kwargs = move(cases_of(name, dtype)[number], device)
    result = ops.TABLE[name].oracle(*args, **kwargs)
    return tensors((result, (args, kwargs)))


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal but for what rounding to `dtype` explains; numbers in E4M3 may be a step apart."""
    assert got.dtype == want.dtype
    rtol, atol = TOLERANCES[dtype]
    if want.dtype == torch.float8_e4m3fn:
        got, want, (rtol, atol) = got.float(), want.float(), E4M3_STEP
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


def move(value: Any, device: str) -> Any:
    """A copy of nested arguments on a device; views keep their strides."""
    if isinstance(value, Tensor):
        storage = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return storage.copy_(value)
    if isinstance(value, GroupMetadata):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        moved = {name: move(part, device) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(value, **moved)
    if isinstance(value, PackedWeight):
        names = ("data", "scales", "zeros")
        return replace(value, **{name: move(getattr(value, name), device) for name in names})
    if isinstance(value, LowRankStacks):
        names = ("a", "b", "scales", "ranks", "affine", "factors", "offsets")
        return replace(value, **{name: move(getattr(value, name), device) for name in names})
    if isinstance(value, ExpertWeights):
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        return replace(value, **{name: move(getattr(value, name), device) for name in names})
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    return tuple(move(item, device) for item in value) if isinstance(value, tuple) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedWeight):
        value = (value.data, value.scales, value.zeros)
    if isinstance(value, QuantizedRows):
        value = (value.values, value.scales)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def randn_caches(
    blocks: int, heads: int, block_size: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return randn(blocks, heads, size, block_size, dtype=dtype), randn(
        blocks, heads, block_size, size, dtype=dtype
    )


def int8_caches(blocks: int, heads: int, block_size: int, size: int) -> tuple[Tensor, Tensor]:
    """Room for a float32 scale with each vector; all bytes are 0."""
    shapes = (blocks, heads, size + 4, block_size), (blocks, heads, block_size, size + 4)
    return torch.zeros(shapes[0], dtype=torch.int8), torch.zeros(shapes[1], dtype=torch.int8)


def make_metadata(batch: list[tuple[int, int]], block_size: int, num_blocks: int) -> AttentionMetadata:
    """Metadata of requests (query length, sequence length), each with blocks of its own in shuffled order."""
    starts = torch.tensor([0, *(query_len for query_len, _ in batch)]).cumsum(0)
    needed = [-(-seq_len // block_size) for _, seq_len in batch]
    free = torch.randperm(num_blocks)
    tables = torch.full((len(batch), max(needed, default=0)), -1)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    return AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in batch], dtype=torch.int32),
        block_tables=tables.int(),
        slot_mapping=torch.full((int(starts[-1]),), -1),
        max_query_len=max((query_len for query_len, _ in batch), default=0),
        max_seq_len=max((seq_len for _, seq_len in batch), default=0),
    )
