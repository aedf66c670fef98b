# SPDX-License-Identifier: Apache-2.0
"""Properties of the oracle itself, against torch's attention, transformers' layers, and the definitions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.formats import format_of
from quire.kernels.linear import WeightScheme
from tests.fixtures.folded import folded

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 20, 4
SCALE = SIZE**-0.5


class Sequence:
    """One request's queries, keys and values, and the shuffled blocks its cache lives in."""

    def __init__(self, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, HEADS, SIZE, generator=generator)
        self.k = torch.randn(length, KV_HEADS, SIZE, generator=generator)
        self.v = torch.randn(length, KV_HEADS, SIZE, generator=generator)
        self.num_blocks = -(-length // BLOCK)

    def slots(self, table: Tensor) -> Tensor:
        positions = torch.arange(len(self.q))
        return table[positions // BLOCK].long() * BLOCK + positions % BLOCK


def full_caches(num_blocks: int, value: float) -> tuple[Tensor, Tensor]:
    keys, values = (num_blocks, KV_HEADS, SIZE, BLOCK), (num_blocks, KV_HEADS, BLOCK, SIZE)
    return torch.full(keys, value), torch.full(values, value)


def attend(sequences: list[Sequence], chunks: list[tuple[int, int]], **features: Any) -> list[Tensor]:
    """Outputs of rows `chunks[r]` = (start, stop) of each sequence, from shuffled blocks of NaN caches."""
    caches = full_caches(64, torch.nan)
    free = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    tables = torch.full((len(sequences), 16), -7, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : sequence.num_blocks], free = free[: sequence.num_blocks], free[sequence.num_blocks :]
        reference.write_kv(sequence.k, sequence.v, *caches, sequence.slots(tables[row]))
    queries = [s.q[start:stop] for s, (start, stop) in zip(sequences, chunks, strict=True)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *map(len, queries)]).cumsum(0).int(),
        seq_lens=torch.tensor([stop for _, stop in chunks], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.full((sum(map(len, queries)),), -1),
        max_query_len=max(map(len, queries)),
        max_seq_len=max(stop for _, stop in chunks),
    )
    out = reference.paged_attention(torch.cat(queries), *caches, metadata, SCALE, **features)
    return list(out.split([len(q) for q in queries]))


BIAS = torch.linspace(-3, 3, 6 * 25).sin().view(6, 25)


def by_definition(
    s: Sequence,
    window: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of every position by the formula in the op's docstring, one query, head and key at a time."""
    out = torch.zeros_like(s.q)
    for i in range(len(s.q)):
        first = 0 if window is None else max(0, i - window + 1)
        keys = range(first if chunk is None else i // chunk * chunk, i + 1)
        for h in range(HEADS):
            head = h // (HEADS // KV_HEADS)
            scores = torch.stack([SCALE * s.q[i, h].dot(s.k[j, head]) for j in keys])
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores = scores - slopes[h] * torch.tensor([float(i - j) for j in keys])
            if bias is not None:
                scores = scores + torch.stack([bias[h, bias.shape[1] // 2 + j - i] for j in keys])
            if sinks is not None:
                scores = torch.cat((scores, sinks[h : h + 1]))
            out[i, h] = scores.softmax(0)[: len(keys)] @ s.v[keys.start : i + 1, head]
    return out


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
def test_paged_attention_equals_contiguous_sdpa(length: int) -> None:
    s = Sequence(length)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (s.q, s.k, s.v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(attend([s], [(0, length)])[0], want)


@folded(
    ("features", "definition"),
    [
        ({}, {}),
        ({"sliding_window": 1}, {"window": 1}),
        ({"sliding_window": 5}, {"window": 5}),
        ({"soft_cap": 0.7}, {"cap": 0.7}),
        ({"alibi_slopes": torch.arange(1, 7) / 8}, {"slopes": torch.arange(1, 7) / 8}),
        ({"sliding_window": 4, "soft_cap": 2.0}, {"window": 4, "cap": 2.0}),
        ({"attention_chunk": 4}, {"chunk": 4}),
        ({"sinks": torch.arange(6) - 2.0}, {"sinks": torch.arange(6) - 2.0}),
        ({"relative_bias": BIAS, "soft_cap": 2.0}, {"bias": BIAS, "cap": 2.0}),
    ],
)
def test_paged_attention_equals_its_definition(features: dict[str, Any], definition: dict[str, Any]) -> None:
    s = Sequence(13)
    want = by_definition(s, **definition)
    torch.testing.assert_close(attend([s], [(0, 13)], **features)[0], want)
    decoded = [attend([s], [(i, i + 1)], **features)[0] for i in range(13)]
    torch.testing.assert_close(torch.cat(decoded), want)
    chunked = [attend([s], [span], **features)[0] for span in [(0, 6), (6, 7), (7, 13)]]
    torch.testing.assert_close(torch.cat(chunked), want)


def test_mixed_and_decode_batches_equal_requests_alone() -> None:
    sequences = [Sequence(length, seed) for seed, length in enumerate([17, 3, 40, 1])]
    for chunks in ([(16, 17), (2, 3), (39, 40), (0, 1)], [(10, 17), (2, 3), (0, 40), (0, 1)]):
        together = attend(sequences, chunks)
        for sequence, chunk, got in zip(sequences, chunks, together, strict=True):
            torch.testing.assert_close(got, attend([sequence], [chunk])[0])


def test_decode_batches_larger_than_the_gather_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, chunks = [Sequence(length, length) for length in (9, 5, 7)], [(8, 9), (4, 5), (6, 7)]
    want = attend(sequences, chunks)
    monkeypatch.setattr(reference, "_GATHER_ELEMENTS", 2 * 9 * KV_HEADS * SIZE)
    torch.testing.assert_close(attend(sequences, chunks), want)


def test_rows_of_no_request_are_zero() -> None:
    caches = full_caches(2, torch.nan)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_tables=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.full((4,), -1),
        max_query_len=1,
        max_seq_len=0,
    )
    out = reference.paged_attention(torch.randn(4, HEADS, SIZE), *caches, metadata, SCALE)
    assert torch.equal(out, torch.zeros(4, HEADS, SIZE))


def test_write_kv_skips_negative_slots_and_touches_nothing_else() -> None:
    caches = full_caches(3, 0.0)
    k, v = torch.ones(3, KV_HEADS, SIZE), torch.full((3, KV_HEADS, SIZE), 2.0)
    reference.write_kv(k, v, *caches, torch.tensor([5, -1, 2]))
    for cache, value in zip(caches, (1.0, 2.0), strict=True):
        by_token = cache.transpose(2, 3) if cache is caches[0] else cache
        assert (by_token[1, :, 1] == value).all()
        assert (by_token[0, :, 2] == value).all()
        assert cache.sum() == 2 * value * KV_HEADS * SIZE


def test_rotary_embedding_equals_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    positions, angles = torch.tensor([3, 0, 11, 7]), torch.outer(torch.arange(12.0), torch.rand(SIZE // 2))
    q, k = torch.randn(4, HEADS, SIZE), torch.randn(4, KV_HEADS, SIZE)
    doubled = torch.cat([angles, angles], -1)[positions]
    want = llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], doubled.cos()[None], doubled.sin()[None]
    )
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    got = reference.rotary_embedding(positions, q, k, cache)
    assert got[0] is q
    assert got[1] is k
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


def test_interleaved_rotary_is_a_complex_product_on_its_part() -> None:
    positions, angles = torch.tensor([2, 5]), torch.outer(torch.arange(6.0), torch.rand(4))
    q, k = torch.randn(2, HEADS, SIZE), torch.randn(2, KV_HEADS, SIZE)
    turned = torch.view_as_complex(q[..., :8].reshape(2, HEADS, 4, 2)) * torch.polar(
        torch.ones(2, 1, 4), angles[positions][:, None]
    )
    want = torch.cat([torch.view_as_real(turned).flatten(2), q[..., 8:]], -1)
    reference.rotary_embedding(positions, q, k, torch.cat([angles.cos(), angles.sin()], -1), interleaved=True)
    torch.testing.assert_close(q, want)


def test_rms_norm_equals_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(37, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(5, 37), torch.randn(5, 37)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = reference.fused_add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(x + residual))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_linear_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 50).to(dtype), torch.randn(8, 50).to(dtype), torch.randn(8).to(dtype)
    want = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    torch.testing.assert_close(
        reference.linear(x, weight, bias), want, rtol=torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("per_tensor", [False, True])
def test_fp8_weights_are_the_nearest_e4m3_numbers(per_tensor: bool) -> None:
    weight = torch.randn(6, 50) * torch.tensor([1e-6, 0.02, 1.0, 30.0, 1e4, 0.0])[:, None]
    scheme = WeightScheme("fp8", per_tensor=per_tensor)
    packed = format_of(scheme).pack(weight, scheme, 1, "rows")
    assert packed.scales is not None
    assert packed.data.dtype == torch.float8_e4m3fn
    assert len(packed.scales.unique()) == (1 if per_tensor else 6)
    error = (reference.unpack_weight(packed) - weight).abs()
    # Three bits of mantissa; the smallest step is 2 ** -9 of a scale.
    assert (error <= weight.abs() / 16 + packed.scales[:, None] * 2**-10).all()


def test_a_cache_in_e4m3_is_cut_off_at_its_largest_number() -> None:
    caches = [torch.zeros(2, 1, 4, 4).to(torch.float8_e4m3fn) for _ in range(2)]
    key = torch.tensor([1.0, 500.0, -1e6, torch.nan]).view(1, 1, 4)
    reference.write_kv(key, -key, *caches, torch.tensor([5]))
    keys, values = caches[0][1, 0, :, 1].float(), caches[1][1, 0, 1].float()
    assert keys[:3].tolist() == [1.0, 448.0, -448.0]
    assert values[:3].tolist() == [-1.0, -448.0, 448.0]
    assert keys[3].isnan()
    assert values[3].isnan()
