# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels on shapes nobody chose, and on arguments nobody should pass; `make sanitize` watches them at it.

Every tensor has memory of exactly its size, at an address that is aligned to its elements and to nothing more.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.attention_metadata import GroupMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.signatures import SIGNATURES
from quire.kernels.experts import ExpertWeights
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.low_rank import LowRankStacks
from tests.fixtures.folded import folded
from tests.kernels.op_cases import (
    CASES,
    FUNCTIONS,
    SCHEMES,
    TOLERANCES,
    int8_caches,
    make_metadata,
    randn,
    randn_caches,
    random_experts,
    random_keys,
    tensors,
)
from tests.kernels.op_cases import settings as sampling_settings

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu.sampling import sample_by_inversion

fuzz = settings(max_examples=40, derandomize=True, deadline=None)
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
seeds = st.integers(0, 2**32)
REFUSALS = (ValueError, TypeError, IndexError)
IN_CPP = [name for name in SIGNATURES if name in ops.TABLE]
MadeOfTensors = PackedWeight | GroupMetadata | LowRankStacks


def kernel(name: str) -> Callable[..., Any]:
    """The C++ implementation of an op."""
    (row,) = (row for row in ops.TABLE[name].implementations if row.name == "cpu")
    return row.load()


def placed(value: Any, offset: int) -> Any:
    """A copy of nested arguments; each tensor begins `offset` elements into memory that ends where it ends."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        offset *= 4 if value.dtype is torch.int8 else 1  # a cache of bytes holds float32 scales, too
        memory = torch.empty(offset + (extent if value.numel() else 0), dtype=value.dtype)
        once = value[tuple(slice(None if step else 1) for step in value.stride())]
        memory.as_strided(once.shape, once.stride(), offset).copy_(once)
        return memory.as_strided(value.shape, value.stride(), offset)
    if isinstance(value, MadeOfTensors):
        return replace(value, **{name: placed(part, offset) for name, part in parts_of(value).items()})
    if isinstance(value, ExpertWeights):
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        return replace(value, **{name: placed(getattr(value, name), offset) for name in names})
    if isinstance(value, dict):
        return {key: placed(item, offset) for key, item in value.items()}
    return tuple(placed(item, offset) for item in value) if isinstance(value, tuple) else value


def parts_of(value: MadeOfTensors) -> dict[str, Tensor]:
    names = (
        *("data", "scales", "zeros", "query_start_loc", "seq_lens", "block_tables"),
        *("a", "b", "ranks", "ends"),
    )
    found = {name: getattr(value, name, None) for name in names}
    return {name: part for name, part in found.items() if part is not None}


def agree(name: str, dtype: torch.dtype, *args: Any, offset: int = 0, **options: Any) -> None:
    """Kernel and oracle have the same results and the same effects."""
    ours, theirs = placed((args, options), offset), placed((args, options), 0)
    results = kernel(name)(*ours[0], **ours[1]), ops.TABLE[name].oracle(*theirs[0], **theirs[1])
    same(dtype, (results[0], ours), (results[1], theirs))


def same(dtype: torch.dtype, ours: Any, theirs: Any) -> None:
    """As nearly as the dtype of a case allows, or that of a result, which is coarser where an argument was changed."""
    for got, want in zip(tensors(ours), tensors(theirs), strict=True):
        rtol, atol = max(TOLERANCES[dtype], TOLERANCES.get(got.dtype, (0.0, 0.0)))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


@fuzz
@given(
    st.sampled_from([scheme for scheme in SCHEMES if not scheme.fast]),
    dtypes,
    st.tuples(*[st.integers(1, 90)] * 2),
    st.integers(1, 9),
    st.integers(0, 40),
    seeds,
)
def test_experts(
    scheme: WeightScheme, dtype: torch.dtype, size: tuple[int, int], count: int, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    of = random_experts(count, *size, scheme, dtype, biased=bool(seed % 2))
    chosen = torch.rand(tokens, count).argsort(1)[:, : 1 + seed % count].int()
    x, weights = randn(tokens, size[0], dtype=dtype), torch.rand(chosen.shape)
    agree("experts", dtype, x, chosen, weights, of, offset=seed % 3)


@pytest.mark.item(58)
@fuzz
@given(
    st.sampled_from(SCHEMES), dtypes, dtypes, st.tuples(*[st.integers(1, 90)] * 2), st.integers(0, 40), seeds
)
def test_linears(
    scheme: WeightScheme,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    size: tuple[int, int],
    rows: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    halves, inputs = 1 + seed % 2, 7 * size[1] - seed % 7
    outputs = halves * size[0]
    matrix = placed((randn(outputs, inputs) * inputs**-0.5).to(dtype), seed % 3)
    weight, expected = (
        kernel("pack_weight")(matrix, scheme, halves),
        reference.pack_weight(matrix, scheme, halves),
    )
    assert all(map(torch.equal, tensors(weight), tensors(expected)))
    x = randn(rows, inputs + 3, dtype=x_dtype)[:, : inputs if seed % 5 else None][:, :inputs]
    bias = torch.randn(outputs) if seed % 4 else None
    ending = "silu_and_mul" if halves == 2 else (None, *FUNCTIONS)[seed % 8]
    agree("packed_linear", x_dtype, x, weight, bias, ending, offset=seed % 3)
    agree("packed_embedding", torch.float32, torch.randint(0, outputs, (rows,)), weight, offset=seed % 2)


@fuzz
@given(dtypes, st.booleans(), st.integers(0, 9), st.integers(1, 400), seeds)
def test_norms_activations_and_tables(
    dtype: torch.dtype, wide_weight: bool, rows: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    offset, gap = seed % 3, seed % 5
    x, residual = randn(rows, size + gap, dtype=dtype)[:, gap:], randn(rows, size, dtype=dtype)
    weight = randn(size, dtype=torch.float32 if wide_weight else dtype)
    agree("rms_norm", dtype, x, weight, 1e-5, offset=offset)
    agree("fused_add_rms_norm", dtype, x, residual, weight, 1e-5, offset=offset)
    bias = weight.flip(0) if seed % 2 else None
    agree("layer_norm", dtype, x, weight, bias, 1e-5, offset=offset)
    agree("fused_add_layer_norm", dtype, x, residual, weight, bias, 1e-5, offset=offset)
    gated = randn(rows, 2 * size, dtype=dtype)
    function = FUNCTIONS[seed % len(FUNCTIONS)]
    agree("activate", dtype, x, offset=offset, function=function)
    agree("silu_and_mul", dtype, gated, offset=offset)
    agree("gelu_and_mul", dtype, gated, offset=offset, approximate=("none", "tanh")[seed % 2])
    agree("embedding", dtype, torch.randint(0, 13, (rows,)), randn(13, size, dtype=dtype), offset=offset)


@fuzz
@given(
    dtypes,
    st.sampled_from((None, torch.float32, torch.int8)),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 17),
    seeds,
)
def test_random_kv_writes_equal_the_oracle(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, tokens: int, half: int, block_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    size, heads = 4 * half if cache_dtype is torch.int8 else 2 * half + seed % 2, 1 + seed % 3
    qkv = randn(tokens, 4 * heads, size, dtype=dtype)
    q, k, v = qkv[:, : 2 * heads], qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    num_blocks = tokens // block_size + 2
    caches = (
        int8_caches(num_blocks, heads, block_size, size)
        if cache_dtype is torch.int8
        else randn_caches(num_blocks, heads, block_size, size, cache_dtype or dtype)
    )
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    slots[seed % 4 :: 4] = -1
    rotary = torch.randint(0, 30, (tokens,)), randn(30, 2 * (1 + seed % half))
    rotated, interleaved = (rotary[0], q, k, rotary[1]), bool(seed % 2)
    agree("rotary_embedding", dtype, *rotated, interleaved, offset=seed % 3)
    agree("write_kv", dtype, k, v, *caches, slots, offset=seed % 3)
    if (
        cache_dtype is not torch.int8
    ):  # where a rounding may go the other way, by a step; test_attention compares bits
        both = (rotary[0], q, k, v, rotary[1], *caches, slots)
        agree("rotary_and_write_kv", dtype, *both, interleaved, offset=seed % 3)
        norms = randn(2, size, dtype=(dtype, torch.float32)[seed % 2])
        agree("rotary_and_write_kv", dtype, *both, interleaved, *norms, 1e-5, offset=seed % 3)


@pytest.mark.item(58)
@fuzz
@given(
    dtypes,
    st.integers(1, 16),
    st.integers(1, 33),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 150)), max_size=4),
    seeds,
)
def test_attention(
    dtype: torch.dtype, eighths: int, block_size: int, lengths: list[tuple[int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    batch = [(queries, queries + cached) for queries, cached in lengths]
    num_blocks = sum(-(-end // block_size) for _, end in batch) + 1
    heads, group, size = 1 + seed % 2, 1 + seed % 7, 8 * eighths
    metadata = make_metadata(batch, block_size, num_blocks)
    q = randn(sum(queries for queries, _ in batch), heads * group, size, dtype=dtype)
    options: list[dict[str, Any]] = [
        {},
        {"sliding_window": 1 + seed % 50},
        {"soft_cap": 4.0},
        {"alibi_slopes": torch.rand(heads * group)},
        {"sinks": 5 * torch.randn(heads * group)},
        {"attention_chunk": 1 + seed % 50},
    ]
    caches = randn_caches(num_blocks, heads, block_size, size, dtype)
    agree(
        "paged_attention",
        dtype,
        q,
        *caches,
        metadata,
        size**-0.5,
        offset=seed % 3,
        **options[seed % 6],
    )


@pytest.mark.item(58)
@fuzz
@given(st.integers(0, 5), st.integers(1, 700), st.sampled_from((0.5, 3.0, 40.0)), seeds)
def test_sampling(rows: int, vocab_size: int, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits, offset = spread * randn(rows, vocab_size), seed % 3
    if seed % 2:
        logits = logits.round()
    keys = random_keys(rows)
    chosen, num_top = torch.randint(0, vocab_size, (rows,)), min(vocab_size, seed % 70)
    agree("sample_tokens", torch.float32, logits, sampling_settings(rows, vocab_size), keys, offset=offset)
    agree("token_logprobs", torch.float32, logits, chosen, offset=offset, num_top=num_top)
    count = min(rows * vocab_size, seed % 50)
    penalties = torch.rand(count, dtype=torch.float64) + 0.5, torch.randn(count, dtype=torch.float64)
    indices = torch.randperm(rows * vocab_size)[:count]
    agree("apply_penalties", torch.float32, logits, indices, *penalties, offset=offset)
    masked = torch.randperm(rows)[: seed % (rows + 1)]
    words = torch.randint(-(2**31), 2**31, (len(masked), -(-vocab_size // 32)), dtype=torch.int32)
    agree("mask_logits", torch.float32, logits, masked, words, offset=offset)
    if logits.numel():
        logits.view(-1)[seed % logits.numel()] = (torch.nan, torch.inf, 1.0)[seed % 3]
    agree("unusable_rows", torch.float32, logits, offset=offset)


WILD = (torch.nan, torch.inf, -torch.inf, -1.0, 0.0, 1e-300, 1e300, 2.0**63)


@fuzz
@given(st.lists(st.sampled_from(WILD), min_size=5, max_size=5), st.integers(1, 300), seeds)
def test_meaningless_settings_are_refused_or_sample_a_token(
    values: list[float], vocab_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    row = torch.tensor([values[:4]], dtype=torch.float64)
    number = torch.tensor(values[4:], dtype=torch.float64)
    if 0.0 <= row[0, 0] <= 1e38 and 1.0 <= row[0, 2] <= 2.0**61:
        (token,) = sample_by_inversion(randn(1, vocab_size), row, number).tolist()
        assert -1 <= token < vocab_size
    else:
        with pytest.raises(ValueError, match="1 rows of settings"):
            sample_by_inversion(randn(1, vocab_size), row, number)


MUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda x: x.double(),
    "int32": lambda x: x.to(torch.int32),
    "int64": lambda x: x.to(torch.int64),
    "float16": lambda x: x.half(),
    "int8": lambda x: x.to(torch.int8),
    "meta": lambda x: x.to("meta"),
    "longer": lambda x: torch.cat([x, x[:1]]),
    "shorter": lambda x: x[:-1].clone(),
    "narrower": lambda x: x[..., :-1].clone(),
    "a narrower view": lambda x: x[..., :-1],
    "every other": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, -1),
    "one more dimension": lambda x: x[None],
    "one dimension less": lambda x: x[0] if x.dim() else x,
    "flat": lambda x: x.reshape(-1),
    "repeated": lambda x: x[:1].expand(x.shape),
    "nothing": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
}
NUMBERS = (-1, -(2**31), 2**31 - 1, 1 << 20, 2**62, -(2**63))


def kinds_for(name: str) -> list[str]:
    """Return the mutations for an op's arguments; overlapping memory has no defined result for ops in place."""
    in_place = name.startswith(("rotary", "write", "apply"))
    return [kind for kind in MUTATIONS if not (in_place and kind == "repeated")]


def mutated(value: Any, data: st.DataObject, kinds: list[str]) -> Any:
    """The same arguments, but for one of the tensors in them."""
    if isinstance(value, Tensor):
        return changed(value, data, kinds)
    if isinstance(value, MadeOfTensors):
        parts = parts_of(value)
        name = data.draw(st.sampled_from(sorted(parts)))
        return replace(value, **{name: changed(parts[name], data, kinds)})
    assert isinstance(value, tuple)
    places = [i for i, item in enumerate(value) if isinstance(item, Tensor | MadeOfTensors)]
    place = data.draw(st.sampled_from(places))
    return (*value[:place], mutated(value[place], data, kinds), *value[place + 1 :])


def changed(tensor: Tensor, data: st.DataObject, kinds: list[str]) -> Tensor:
    is_index = tensor.dtype in (torch.int32, torch.int64)
    if is_index and tensor.numel() and data.draw(st.booleans()):
        info = torch.iinfo(tensor.dtype)
        number = data.draw(st.sampled_from([n for n in NUMBERS if info.min <= n <= info.max]))
        place = data.draw(st.integers(0, tensor.numel() - 1))
        return tensor.flatten().index_fill(0, torch.tensor([place]), number).view(tensor.shape)
    name = data.draw(st.sampled_from(kinds))
    return MUTATIONS[name](tensor) if tensor.numel() else tensor.double()


@pytest.mark.parametrize("name", IN_CPP)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data(), dtypes)
def test_wrong_argument_is_refused_or_matches_the_oracle(
    name: str, data: st.DataObject, dtype: torch.dtype
) -> None:
    cases = good_cases(name, dtype) or good_cases(name, torch.float32)
    args, options = data.draw(st.sampled_from(cases))
    ours = placed(mutated(args, data, kinds_for(name)), 0), placed(options, 0)
    theirs = placed(ours, 0)
    try:
        result = kernel(name)(*ours[0], **ours[1])
    except REFUSALS as refusal:
        if not str(refusal).startswith(name):
            raise
        return
    same(dtype, (result, ours), (ops.TABLE[name].oracle(*theirs[0], **theirs[1]), theirs))


@functools.cache
def good_cases(name: str, dtype: torch.dtype) -> list[Any]:
    """Some small calls of an op, the last of them with all its options."""
    torch.manual_seed(0)
    accepts = next(row.accepts for row in ops.TABLE[name].implementations if row.name == "cpu")
    cases = [case for case in CASES[name](dtype) if accepts is None or accepts(*case[0], **case[1])]
    small = [case for case in cases if sum(part.numel() for part in tensors(case)) < 20_000]
    return small[-8:]


def misaligned(tensor: Tensor) -> Tensor:
    """A copy whose memory begins half an element past where it should."""
    half = (4 if tensor.dtype is torch.int8 else tensor.itemsize) // 2
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.from_numpy(np.zeros(half + extent * tensor.itemsize, np.uint8)[half:]).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def misplacements(value: Any) -> Iterator[Any]:
    """The same arguments with one tensor after the other misaligned; bytes, and what is not there, cannot be."""
    if isinstance(value, Tensor):
        if value.numel() and (value.itemsize > 1 or value.dtype is torch.int8):
            yield misaligned(value)
    elif isinstance(value, MadeOfTensors):
        for name, part in parts_of(value).items():
            yield from (replace(value, **{name: wrong}) for wrong in misplacements(part))
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from ((*value[:place], wrong, *value[place + 1 :]) for wrong in misplacements(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (value | {key: wrong} for wrong in misplacements(item))


@pytest.mark.parametrize("name", IN_CPP)
@folded("dtype", TOLERANCES)
def test_a_tensor_that_is_not_aligned_to_its_elements_is_refused(name: str, dtype: torch.dtype) -> None:
    """Unless torch has to copy it first, into another dtype or because of its strides: the copy is aligned."""
    if not (cases := good_cases(name, dtype)):
        pytest.skip("no kernel takes this dtype")
    refusals = []
    for args, options in (case for case in cases if tensors(case)[0].numel()):
        for wrong in misplacements((args, options)):
            theirs = placed((args, options), 0)
            try:
                result = kernel(name)(*wrong[0], **wrong[1])
            except ValueError as refusal:
                refusals.append(str(refusal))
            else:
                same(dtype, (result, wrong), (ops.TABLE[name].oracle(*theirs[0], **theirs[1]), theirs))
    message = re.compile(rf"{name}: \w+, torch\.\w+ \[.*\], must begin at a multiple of [248] bytes")
    assert refusals
    assert all(map(message.match, refusals))


HUGE: dict[str, Callable[[], object]] = {
    "embedding": lambda: kernel("embedding")(torch.zeros(0).long(), torch.empty(0, 2**62)),
    "rms_norm": lambda: kernel("rms_norm")(torch.empty(0, 2**62), torch.empty(1).expand(2**62), 1e-5),
    "write_kv": lambda: kernel("write_kv")(
        torch.ones(1, 1, 8),
        torch.ones(1, 1, 8),
        torch.empty(0, 1, 8, 2**59),
        torch.empty(0, 1, 2**59, 8),
        torch.tensor([2**60]),
    ),
    "paged_attention": lambda: kernel("paged_attention")(
        torch.ones(1, 1, 8),
        torch.empty(0, 1, 8, 2**59),
        torch.empty(0, 1, 2**59, 8),
        make_metadata([(1, 1)], 8, 1),
        1.0,
    ),
    "packed_linear": lambda: kernel("packed_linear")(
        torch.ones(1, 8),
        PackedWeight(WeightScheme(), torch.empty(0, 8, 16), None, None, 2**62, 2**62),
    ),
    "sample_tokens": lambda: kernel("sample_tokens")(
        torch.empty(0, 2**40), torch.empty(0, 4).double(), torch.empty(0, 2).long()
    ),
}


@folded("name", HUGE)
def test_sizes_with_a_product_beyond_64_bits_are_refused(name: str) -> None:
    with pytest.raises(REFUSALS, match=name):
        HUGE[name]()
