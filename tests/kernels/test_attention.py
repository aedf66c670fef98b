# SPDX-License-Identifier: Apache-2.0
"""The C++ attention and KV cache kernels: near the oracle for every option, and the same bits in any company."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from tests.fixtures.folded import folded
from tests.fixtures.threads import shuffle
from tests.kernels.op_cases import TOLERANCES, int8_caches

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import attention, elementwise

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 70},
    "soft_cap": {"soft_cap": 2.5},
    "alibi": {"alibi_slopes": 0.3},
    "sinks": {"sinks": 1.0},
    "all": {"sliding_window": 33, "soft_cap": 4.0, "alibi_slopes": 0.1},
    "chunk and sinks": {"attention_chunk": 33, "sinks": 3.0},
    "bias": {"relative_bias": 2048},
}


@dataclass(frozen=True)
class Shape:
    q_heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32

    def options(self, feature: str) -> dict[str, Any]:
        options = dict(FEATURES[feature])
        for name in options.keys() & {"alibi_slopes", "sinks"}:
            options[name] = options[name] / torch.arange(1, self.q_heads + 1)
        if "relative_bias" in options:
            numbers = torch.arange(self.q_heads * (2 * options["relative_bias"] - 1))
            options["relative_bias"] = (3 * (numbers * 0.7).sin()).view(self.q_heads, -1)
        return options


class Cache:
    """Sequences of random queries, keys and values in shuffled blocks of a cache that is otherwise poisoned."""

    def __init__(self, shape: Shape, lengths: Sequence[int], placement: int = 0) -> None:
        self.shape = shape
        num_blocks = sum(-(-length // shape.block_size) for length in lengths) + 3
        self.k, self.v = poisoned(num_blocks, shape)
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(placement)).int().tolist()
        self.tables, self.queries = [], []
        for seed, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(100 * seed + length)
            q, k, v = (
                torch.randn(length, heads, shape.size, generator=generator).to(shape.dtype)
                for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
            )
            table = torch.tensor(
                [free.pop() for _ in range(-(-length // shape.block_size))], dtype=torch.int32
            )
            positions = torch.arange(length)
            slots = (
                table[positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
            )
            attention.write_kv(k, v, self.k, self.v, slots)
            self.tables.append(table)
            self.queries.append(q)

    def step(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, AttentionMetadata]:
        """Queries and metadata of a batch of (sequence, first position, end position)."""
        queries = torch.cat([self.queries[i][start:end] for i, start, end in spans])
        tables = torch.full(
            (len(spans), max(len(self.tables[i]) for i, _, _ in spans) + 1), -5, dtype=torch.int32
        )
        for row, (i, _, end) in enumerate(spans):
            needed = -(-end // self.shape.block_size)
            tables[row, :needed] = self.tables[i][:needed]
        lengths = [end - start for _, start, end in spans]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.full((sum(lengths),), -1),
            max_query_len=max(lengths),
            max_seq_len=max(end for _, _, end in spans),
        )
        return queries, metadata

    def attend(self, spans: Sequence[tuple[int, int, int]], **options: Any) -> list[Tensor]:
        q, metadata = self.step(spans)
        out = attention.paged_attention(q, self.k, self.v, metadata, self.shape.size**-0.5, **options)
        return list(out.split([end - start for _, start, end in spans]))

    def whole(self, sequence: int, **options: Any) -> Tensor:
        return self.attend([(sequence, 0, len(self.queries[sequence]))], **options)[0]

    def compare(self, spans: Sequence[tuple[int, int, int]], **options: Any) -> None:
        q, metadata = self.step(spans)
        want = reference.paged_attention(q, self.k, self.v, metadata, self.shape.size**-0.5, **options)
        rtol, atol = TOLERANCES[self.shape.dtype]
        torch.testing.assert_close(torch.cat(self.attend(spans, **options)), want, rtol=rtol, atol=atol)


def poisoned(num_blocks: int, shape: Shape) -> tuple[Tensor, Tensor]:
    if shape.cache_dtype == torch.int8:  # all bits set is a NaN scale
        k, v = int8_caches(num_blocks, shape.kv_heads, shape.block_size, shape.size)
        return k.fill_(-1), v.fill_(-1)
    k = torch.full(
        (num_blocks, shape.kv_heads, shape.size, shape.block_size), torch.nan, dtype=shape.cache_dtype
    )
    return k, k.view(num_blocks, shape.kv_heads, shape.block_size, shape.size).clone()


MIXED = [(0, 0, 90), (1, 11, 12), (2, 100, 133), (3, 0, 1), (1, 5, 9), (2, 132, 133)]
LENGTHS = [90, 40, 133, 1]


@folded("feature", list(FEATURES))
@folded("size", [8, 32, 64, 80, 96, 128, 256])
def test_head_sizes(size: int, feature: str) -> None:
    shape = Shape(size=size)
    Cache(shape, LENGTHS).compare(MIXED, **shape.options(feature))


@folded("feature", ["plain", "all"])
@folded("group", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_query_heads_of_a_key_head(group: int, feature: str) -> None:
    shape = Shape(q_heads=2 * group, size=32)
    Cache(shape, LENGTHS).compare(MIXED, **shape.options(feature))


@folded("feature", list(FEATURES))
@folded("block_size", [1, 8, 12, 16, 32, 128])
def test_block_sizes(block_size: int, feature: str) -> None:
    shape = Shape(block_size=block_size, size=32)
    Cache(shape, LENGTHS).compare(MIXED, **shape.options(feature))


@folded("cache_dtype", [*FLOATS, torch.int8], ids=str)
@folded("dtype", FLOATS, ids=str)
def test_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for block_size in (8, 12, 16):
        shape = Shape(dtype=dtype, cache_dtype=cache_dtype, block_size=block_size)
        Cache(shape, LENGTHS).compare(MIXED)
        Cache(shape, LENGTHS).compare(MIXED, **shape.options("all"))


def test_contexts_of_several_splits() -> None:
    for feature in ("plain", "window", "all"):
        shape = Shape(q_heads=7, kv_heads=1)
        spans = [(0, 1299, 1300), (1, 500, 530), (0, 1000, 1030)]
        Cache(shape, [1300, 530]).compare(spans, **shape.options(feature))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_any_batch_is_near_the_oracle_and_each_request_as_alone(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(
        q_heads=kv_heads * data.draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        size=8 * data.draw(st.integers(1, 10)),
        block_size=data.draw(st.integers(1, 40)),
        cache_dtype=data.draw(st.sampled_from([*FLOATS, torch.int8])),
    )
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    spans = []
    for sequence, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        spans.append((sequence, start, data.draw(st.integers(start + 1, length))))
    options: dict[str, Any] = {}
    if window := data.draw(st.none() | st.integers(1, 150)):
        options["sliding_window"] = window
    cache = Cache(shape, lengths)
    cache.compare(spans, **options)
    for span, together in zip(spans, cache.attend(spans, **options), strict=True):
        assert torch.equal(cache.attend([span], **options)[0], together)


BITWISE = [
    (Shape(q_heads=14, kv_heads=2), "plain"),
    (Shape(q_heads=4, kv_heads=4, size=80, dtype=torch.bfloat16, cache_dtype=torch.bfloat16), "plain"),
    (Shape(q_heads=3, kv_heads=1, size=32, dtype=torch.float16, cache_dtype=torch.int8), "plain"),
    (Shape(q_heads=8, kv_heads=1, size=128, dtype=torch.bfloat16, cache_dtype=torch.bfloat16), "window"),
    (Shape(q_heads=4, kv_heads=2, block_size=12), "all"),
]
bitwise = pytest.mark.parametrize(("shape", "feature"), BITWISE, ids=str)


@bitwise
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_any_size_give_the_bits_of_the_whole(shape: Shape, feature: str, chunk: int) -> None:
    length = 600  # more than one split
    cache, options = Cache(shape, [length]), shape.options(feature)
    spans = [(0, start, min(start + chunk, length)) for start in range(0, length, chunk)]
    chunks = [cache.attend([span], **options)[0] for span in spans]
    assert torch.equal(torch.cat(chunks), cache.whole(0, **options))


@bitwise
def test_batch_placement_and_threads_change_no_bit(shape: Shape, feature: str, restore_threads: None) -> None:
    lengths, options = [1300, 40, 530, 1], shape.options(feature)
    set_num_threads(1)
    alone = [Cache(shape, lengths).whole(i, **options) for i in range(len(lengths))]
    spans = [(0, 1299, 1300), (1, 0, 40), (2, 529, 530), (3, 0, 1), (0, 700, 800), (2, 0, 530)]
    for threads, placement in itertools.product((1, 2, 3, 8), (0, 5)):
        set_num_threads(threads)
        shuffle(threads * placement)
        cache = Cache(shape, lengths, placement)
        for (i, start, end), out in zip(spans, cache.attend(spans, **options), strict=True):
            assert torch.equal(out, alone[i][start:end])
        # One request, fewer work items than threads: its splits run apart.
        assert torch.equal(cache.attend([(0, 1299, 1300)], **options)[0], alone[0][1299:])


def test_plan_serves_only_the_batch_that_it_was_made_for(restore_threads: None) -> None:
    """A thread keeps the last one; here a call differs from the one before in a single thing that plans depend on."""
    few, many, small = Shape(), Shape(q_heads=8), Shape(size=32)
    caches = {shape: Cache(shape, [700, 600, 650]) for shape in (few, many, small)}
    decode, other, chunk = (
        [(0, 699, 700), (1, 9, 10)],
        [(0, 699, 700), (1, 599, 600)],
        [(2, 0, 650), (1, 0, 600)],
    )
    calls = [
        (few, decode, 0),
        (few, other, 0),
        (few, other, 70),
        (many, other, 70),
        (small, other, 70),
        (few, chunk, 0),
    ]
    for threads in (1, 8, 2):
        set_num_threads(threads)
        for shape, spans, window in [*calls, *reversed(calls)]:
            caches[shape].compare(spans, **({"sliding_window": window} if window else {}))


def test_a_batch_that_changed_where_it_lies_is_planned_again() -> None:
    shape = Shape()
    cache = Cache(shape, [700, 600])
    q, metadata = cache.step([(0, 699, 700), (1, 9, 10)])
    attention.paged_attention(q, cache.k, cache.v, metadata, 0.125)
    later_q, later = cache.step([(0, 699, 700), (1, 599, 600)])
    metadata.seq_lens.copy_(later.seq_lens)
    metadata.block_tables.copy_(later.block_tables)
    out = attention.paged_attention(later_q, cache.k, cache.v, metadata, 0.125)
    assert torch.equal(out, attention.paged_attention(later_q, cache.k, cache.v, later, 0.125))
    assert torch.equal(out, torch.cat(cache.attend([(0, 699, 700), (1, 599, 600)])))
    torch.testing.assert_close(out, reference.paged_attention(later_q, cache.k, cache.v, later, 0.125))


def test_portable_kernels_keep_the_contract_too(
    monkeypatch: pytest.MonkeyPatch, restore_threads: None
) -> None:
    portable = library.open_library(library.PATH, "portable")
    monkeypatch.setattr(library, "loaded", lambda: portable)
    shape = Shape(dtype=torch.bfloat16, cache_dtype=torch.int8)
    cache = Cache(shape, [600])
    cache.compare([(0, 0, 600)])
    whole = cache.whole(0)
    for threads, (start, end) in itertools.product((1, 2), [(0, 7), (599, 600), (64, 100)]):
        set_num_threads(threads)
        assert torch.equal(cache.attend([(0, start, end)])[0], whole[start:end])


def test_keys_before_the_window_are_never_read() -> None:
    shape = Shape(block_size=16)
    cache = Cache(shape, [300])
    want = cache.attend([(0, 290, 300)], sliding_window=50)[0]
    for block in cache.tables[0][:15].tolist():
        cache.k[block], cache.v[block] = torch.nan, torch.nan
    cache.tables[0][:15] = -1
    assert torch.equal(cache.attend([(0, 290, 300)], sliding_window=50)[0], want)


@pytest.mark.parametrize(("start", "end"), [(290, 300), (299, 300), (250, 300), (128, 190)])
def test_block_ids_wholly_behind_a_window_are_never_looked_at(start: int, end: int) -> None:
    """The cache manager gives those blocks away; what is left of them in the table may be anything."""
    cache, window = Cache(Shape(), [300]), 50
    want = cache.attend([(0, start, end)], sliding_window=window)[0]
    first_block = (start - window + 1) // 16
    kept = cache.tables[0][first_block].clone()
    for stale in (-5, 10**6, 0):
        cache.tables[0][:first_block] = stale
        assert torch.equal(cache.attend([(0, start, end)], sliding_window=window)[0], want)
    cache.tables[0][first_block] = 10**6
    with pytest.raises(IndexError):
        cache.attend([(0, start, end)], sliding_window=window)
    cache.tables[0][first_block] = kept


def test_a_request_that_is_not_finite_spoils_no_other() -> None:
    cache = Cache(Shape(), [100, 100])
    want = cache.whole(1)
    cache.queries[0].fill_(torch.nan)
    for block in cache.tables[0].tolist():
        cache.v[block] = torch.inf
    got = cache.attend([(0, 0, 100), (1, 0, 100)])
    assert torch.equal(got[1], want)
    assert got[0].isnan().all()


def test_rows_of_no_request_are_zero() -> None:
    cache = Cache(Shape(), [9, 9])
    q, metadata = cache.step([(0, 8, 9), (1, 8, 9)])
    metadata = replace(metadata, seq_lens=torch.tensor([9, 0], dtype=torch.int32))
    padded = torch.cat([q, torch.full_like(q, torch.nan)])
    out = attention.paged_attention(padded, cache.k, cache.v, metadata, 0.125)
    assert torch.equal(out[1:], torch.zeros(3, 4, 64))
    assert torch.equal(out[0], cache.attend([(0, 8, 9)])[0][0])


def test_strided_queries_have_the_bits_of_their_copy() -> None:
    cache = Cache(Shape(), [50])
    q, metadata = cache.step([(0, 20, 50)])
    fused = torch.cat([q.flatten(1), torch.full((30, 100), torch.nan)], 1)
    view = fused[:, :256].view(30, 4, 64)
    assert not view.is_contiguous()
    out = attention.paged_attention(view, cache.k, cache.v, metadata, 0.125)
    assert torch.equal(out, attention.paged_attention(q, cache.k, cache.v, metadata, 0.125))


@folded("cache_dtype", [*FLOATS, torch.int8], ids=str)
@folded("dtype", FLOATS, ids=str)
def test_stored_bits_are_the_oracles(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for block_size, size in [(16, 64), (3, 24), (1, 8), (128, 128)]:
        shape = Shape(size=size, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype)
        k, v = torch.randn(2, 6, 2, size).to(dtype)
        k[0, 0], v[1, 1] = 0, 1e-30
        slots = torch.randperm(6 * block_size)[:6]
        slots[3] = -1
        ours, theirs = poisoned(6, shape), poisoned(6, shape)
        attention.write_kv(k, v, *ours, slots)
        reference.write_kv(k, v, *theirs, slots)
        for got, want in zip(ours, theirs, strict=True):
            assert torch.equal(got.view(torch.int8), want.view(torch.int8))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_vector_that_is_not_finite_is_cached_in_int8_as_nan(value: float) -> None:
    k = torch.randn(1, 1, 8)
    k[0, 0, 3] = value
    for function in (attention.write_kv, reference.write_kv):
        keys, values = int8_caches(1, 1, 4, 8)
        function(k, k, keys, values, torch.tensor([2]))
        scales = keys[0, 0, 8:].flatten().view(torch.float32)
        assert scales.isnan().tolist() == [False, False, True, False]
        assert not keys[0, 0, :8].any()


@pytest.mark.parametrize("cache_dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [None, "of the heads' dtype", "in float32"])
def test_fused_norm_rotary_and_write_have_the_bits_of_each(
    cache_dtype: torch.dtype, interleaved: bool, norms: str | None, restore_threads: None
) -> None:
    for dtype, threads, tokens in itertools.product(FLOATS, (1, 2), (0, 1, 200)):
        set_num_threads(threads)
        shape = Shape(q_heads=6, size=96, dtype=dtype, cache_dtype=cache_dtype)
        q, k, v = torch.randn(tokens, 10, 96).to(dtype).split([6, 2, 2], 1)
        positions, slots = torch.randint(0, 50, (tokens,)), torch.randperm(40 * 16)[:tokens]
        table, separate, fused = torch.randn(50, 64), poisoned(40, shape), poisoned(40, shape)
        q2, k2, options = q.clone(), k.clone(), {}
        if norms is not None:
            weights = torch.randn(2, 96).to(torch.float32 if norms == "in float32" else dtype)
            q2, k2 = (elementwise.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
            options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
        attention.rotary_embedding(positions, q2, k2, table, interleaved)
        attention.write_kv(k2, v, *separate, slots)
        attention.rotary_and_write_kv(positions, q, k, v, table, *fused, slots, interleaved, **options)
        assert torch.equal(q, q2)
        assert torch.equal(k, k2)
        for got, want in zip(fused, separate, strict=True):
            assert torch.equal(got.view(torch.int8), want.view(torch.int8))


def test_norms_of_heads_come_in_pairs() -> None:
    cache, x, weight = Cache(Shape(), [20]), torch.ones(1, 2, 64), torch.ones(64)
    index, table = torch.tensor([0]), torch.ones(1, 64)

    def run(**norms: Tensor) -> None:
        attention.rotary_and_write_kv(
            index, x.clone(), x.clone(), x, table, cache.k, cache.v, index, eps=1e-6, **norms
        )

    run(q_norm=weight, k_norm=weight)
    with pytest.raises(ValueError, match=r"one dtype.* they are float32 \[64\] and none for"):
        run(q_norm=weight)
    with pytest.raises(ValueError, match=r"float32 \[64\] and float16 \[64\] for"):
        run(q_norm=weight, k_norm=weight.half())
    with pytest.raises(ValueError, match=r"k_norm must be contiguous of shape \[64\]"):
        run(q_norm=weight, k_norm=weight[:32])


def attend(**changed: Any) -> Tensor:
    good = Cache(Shape(), [20])
    q, metadata = good.step([(0, 10, 20)])
    options = {
        name: changed.pop(name) for name in ("sliding_window", "soft_cap", "alibi_slopes") if name in changed
    }
    tensors = {"q": q, "k_cache": good.k, "v_cache": good.v}
    fields = {name: value for name, value in changed.items() if name not in tensors}
    arguments = (tensors | {name: value for name, value in changed.items() if name in tensors}).values()
    return attention.paged_attention(*arguments, replace(metadata, **fields), 0.125, **options)


def write(**changed: Tensor) -> None:
    k, v = poisoned(2, Shape())
    good = {"k": torch.ones(3, 2, 64), "v": torch.ones(3, 2, 64), "k_cache": k, "v_cache": v}
    attention.write_kv(*(good | {"slots": torch.tensor([0, 1, 31])} | changed).values())


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@folded(
    ("call", "error", "message"),
    [
        (
            lambda: attend(block_tables=ints([0, 5])),
            IndexError,
            r"request 0 .* blocks \[0, 5\] .* of 5 blocks",
        ),
        (lambda: attend(block_tables=ints([-1, 0])), IndexError, "request 0"),
        (lambda: attend(seq_lens=ints(33)), IndexError, "33 tokens"),
        (lambda: attend(seq_lens=ints(-1)), IndexError, "-1 tokens"),
        (lambda: attend(query_start_loc=ints(0, 11)), IndexError, r"query_start_loc \[0, 11\] does not fit"),
        (lambda: attend(query_start_loc=ints(-1, 10)), IndexError, "query_start_loc"),
        (lambda: attend(query_start_loc=ints(5, 3)), IndexError, r"rows \[5, 3\)"),
        (lambda: attend(query_start_loc=ints(0, 5, 10)), ValueError, r"metadata must be \[R \+ 1\]"),
        (lambda: attend(seq_lens=torch.tensor([20])), ValueError, r"contiguous int32; it has int64 \[1\]"),
        (lambda: attend(block_tables=ints([1, 2, 3, 4])[:, ::2]), ValueError, "contiguous int32"),
        (lambda: attend(q=torch.ones(10, 4, 64).double()), TypeError, "q must be float32"),
        (lambda: attend(q=torch.ones(10, 256)), ValueError, r"q must be .* \[tokens, heads, size\]"),
        (lambda: attend(q=torch.ones(10, 3, 64)), ValueError, "must be a multiple"),
        (lambda: attend(q=torch.ones(10, 64, 4).transpose(1, 2)), ValueError, "stride 1"),
        (lambda: attend(q=torch.ones(10, 4, 32)), ValueError, "caches for 2 heads of 32"),
        (lambda: attend(k_cache=torch.ones(5, 2, 16, 64)), ValueError, "caches for 2 heads of 64"),
        (lambda: attend(k_cache=torch.ones(5, 2, 64, 16).half()), TypeError, "caches are"),
        (lambda: attend(v_cache=torch.ones(4, 2, 16, 64)), ValueError, "caches for"),
        (lambda: attend(v_cache=torch.ones(5, 2, 64, 16).transpose(2, 3)), ValueError, "must be contiguous"),
        (lambda: write(slots=torch.tensor([0, 32, 1])), IndexError, "1 slots are outside the cache of 32"),
        (
            lambda: write(slots=torch.tensor([0, 1])),
            ValueError,
            r"slot_mapping must be contiguous int64 \[3\]",
        ),
        (lambda: write(v=torch.ones(3, 1, 64)), ValueError, "v must be"),
        (lambda: write(k=torch.ones(3, 2, 64).half()), ValueError, "v must be torch.float16"),
        (lambda: write(k=torch.ones(3, 1, 64), v=torch.ones(3, 1, 64)), ValueError, "caches for 1 heads"),
        (
            lambda: elementwise.embedding(torch.tensor([0, 9]), torch.ones(9, 4)),
            IndexError,
            "1 ids are outside",
        ),
        (
            lambda: elementwise.embedding(torch.tensor([-1]), torch.ones(9, 4)),
            IndexError,
            "1 ids are outside",
        ),
        (lambda: elementwise.embedding(torch.tensor([0.0]), torch.ones(9, 4)), ValueError, "ids must be"),
    ],
)
def test_wrong_arguments_are_clear_errors(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
