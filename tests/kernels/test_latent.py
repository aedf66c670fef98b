# SPDX-License-Identifier: Apache-2.0
"""Latent attention: what keys and values that are made would give, and the same bits in any company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import reference, reference_attention
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import FLOAT
from tests.fixtures.folded import folded
from tests.kernels.op_cases import SCHEMES, TOLERANCES

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())

if library.loaded() is not None:
    from quire.kernels.cpu import latent

Span = tuple[int, int, int]
"""A sequence, and from which position to which its queries are in the step."""


def cut(table: Tensor, lengths: Sequence[int], ends: Sequence[int]) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=table,
        slot_mapping=torch.full((sum(lengths),), -1),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
    )


class Latents:
    """Sequences of random queries, and latents in shuffled blocks of a cache that is otherwise NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int = 4,
        rank: int = 32,
        rope: int = 8,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        random = torch.Generator().manual_seed(sum(lengths))
        self.block_size, self.rank, self.dtype = block_size, rank, dtype
        self.scale = (rank + rope) ** -0.5
        width = -(-max(lengths) // block_size)
        num_blocks = width * len(lengths) + 2
        self.cache = torch.full((num_blocks, block_size, rank + rope), torch.nan, dtype=cache_dtype)
        order = torch.randperm(num_blocks, generator=random).int()
        self.tables = order[: width * len(lengths)].view(len(lengths), width)
        self.queries = []
        for row, length in enumerate(lengths):
            self.queries.append(torch.randn(length, heads, rank + rope, generator=random).to(dtype))
            at = torch.arange(length)
            kept = torch.randn(length, rank + rope, generator=random).to(cache_dtype)
            self.cache[self.tables[row][at // block_size].long(), at % block_size] = kept

    def step(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, float]:
        queries = torch.cat([self.queries[i][start:end] for i, start, end in spans])
        lengths, ends = [end - start for _, start, end in spans], [end for _, _, end in spans]
        metadata = cut(self.tables[[i for i, _, _ in spans]].contiguous(), lengths, ends)
        return queries[..., : self.rank], queries[..., self.rank :], self.cache, metadata, self.scale

    def attend(self, spans: Sequence[Span]) -> list[Tensor]:
        out = latent.latent_attention(*self.step(spans))
        return list(out.split([end - start for _, start, end in spans]))

    def compare(self, spans: Sequence[Span]) -> None:
        want = reference_attention.latent_attention(*self.step(spans))
        rtol, atol = TOLERANCES[self.dtype]
        torch.testing.assert_close(torch.cat(self.attend(spans)), want, rtol=rtol, atol=atol)


def test_absorbed_form_is_attention_over_decompressed_kv() -> None:
    """All three ops by reference, against a softmax over what a matrix makes of the latents."""
    torch.manual_seed(0)
    tokens, heads, rank, rope, key_size, value_size = 21, 3, 32, 8, 24, 16
    rows, q = torch.randn(tokens, rank + rope), torch.randn(tokens, heads, key_size + rope)
    key_up, value_up = torch.randn(heads, key_size, rank) / 4, torch.randn(heads, value_size, rank) / 4
    norm, angles = torch.rand(rank) + 0.5, torch.randn(tokens, rope // 2)
    table, positions = torch.cat([angles.cos(), angles.sin()], 1), torch.arange(tokens)

    latents = rows[:, :rank] * torch.rsqrt(rows[:, :rank].square().mean(1, keepdim=True) + 1e-5) * norm
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)  # noqa: E731
    keys = torch.cat(
        [torch.einsum("hkr,tr->htk", key_up, latents), turned(rows[:, rank:]).expand(heads, -1, -1)], 2
    )
    values = torch.einsum("hvr,tr->htv", value_up, latents)
    queries = torch.cat([q[..., :key_size].transpose(0, 1), turned(q[..., key_size:].transpose(0, 1))], 2)
    scores = (queries @ keys.transpose(1, 2) * 0.3).masked_fill(
        torch.ones(tokens, tokens).triu(1).bool(), -torch.inf
    )
    expected = (scores.softmax(-1) @ values).transpose(0, 1)

    cache, blocks = torch.full((6, 4, rank + rope), torch.nan), torch.tensor([[5, 0, 2, 1, 4, 3]]).int()
    slots = blocks[0][positions // 4].long() * 4 + positions % 4
    key_matrix = reference.pack_weight(key_up.transpose(1, 2).flatten(0, 1), FLOAT)
    value_matrix = reference.pack_weight(value_up.flatten(0, 1), FLOAT)
    before = rows.clone()
    reference_attention.write_latents(
        positions, q[..., key_size:], rows, norm, table, cache, slots, 1e-5, True
    )
    absorbed = reference_attention.per_head_linear(q[..., :key_size], key_matrix)
    mixed = reference_attention.latent_attention(
        absorbed, q[..., key_size:], cache, cut(blocks, [tokens], [tokens]), 0.3
    )
    torch.testing.assert_close(
        reference_attention.per_head_linear(mixed, value_matrix), expected, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(rows, before)


MIXED = [(0, 0, 90), (1, 11, 12), (2, 100, 133), (3, 0, 1), (1, 5, 9), (2, 132, 133)]
LENGTHS = [90, 40, 133, 1]


@needs_kernels
@folded("rank", [16, 48, 256, 512])
@folded("heads", [1, 5, 16, 40, 128])
def test_sizes(heads: int, rank: int) -> None:
    Latents(LENGTHS, heads=heads, rank=rank, rope=64 if rank > 100 else 8).compare(MIXED)


@needs_kernels
@folded("cache_dtype", FLOATS, ids=str)
@folded("dtype", FLOATS, ids=str)
def test_dtypes_and_block_sizes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for block_size in (1, 8, 12, 16, 128):
        Latents(LENGTHS, dtype=dtype, cache_dtype=cache_dtype, block_size=block_size).compare(MIXED)


@needs_kernels
def test_contexts_of_several_splits() -> None:
    Latents([1300, 530]).compare([(0, 1299, 1300), (1, 500, 530), (0, 1000, 1030)])


@pytest.fixture
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    set_num_threads(count)


@needs_kernels
@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.data())
def test_any_batch_is_near_the_oracle_and_each_query_as_alone(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    spans = []
    for sequence, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        spans.append((sequence, start, data.draw(st.integers(start + 1, length))))
    latents = Latents(
        lengths,
        heads=data.draw(st.integers(1, 40)),
        rank=16 * data.draw(st.integers(1, 6)),
        rope=8 * data.draw(st.integers(1, 4)),
        block_size=data.draw(st.integers(1, 40)),
        cache_dtype=data.draw(st.sampled_from(FLOATS)),
    )
    latents.compare(spans)
    for (sequence, start, end), together in zip(spans, latents.attend(spans), strict=True):
        alone = [latents.attend([(sequence, at, at + 1)])[0] for at in range(start, end)]
        assert torch.equal(torch.cat(alone), together)


@needs_kernels
@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit() -> None:
    spans = [(0, 1290, 1300), (1, 500, 530), (0, 3, 300)]
    latents, got = Latents([1300, 530], heads=16), []
    for count in (1, 2, 3, 7):
        set_num_threads(count)
        got.append(torch.cat(latents.attend(spans)))
    assert all(torch.equal(one, got[0]) for one in got)


@needs_kernels
@pytest.mark.usefixtures("threads")
@folded("scheme", SCHEMES, ids=str)
def test_rows_of_heads_are_as_if_alone(scheme: object) -> None:
    """Also those beyond what is multiplied together, and whoever multiplies them."""
    torch.manual_seed(1)
    weight = reference.pack_weight(torch.randn(3 * 32, 70), scheme)  # type: ignore[arg-type]
    x = torch.randn(401, 3, 80)[..., 3:73]
    together = latent.per_head_linear(x, weight)
    for count in (1, 3):
        set_num_threads(count)
        for start, end in ((0, 1), (7, 20), (190, 401)):
            assert torch.equal(latent.per_head_linear(x[start:end], weight), together[start:end])


@needs_kernels
@folded("scheme", SCHEMES, ids=str)
def test_a_head_has_the_bits_of_a_linear_layer_of_its_own(scheme: object) -> None:
    from quire.kernels.cpu import linear

    torch.manual_seed(2)
    matrices, x = torch.randn(4, 48, 130), torch.randn(9, 4, 130)
    together = latent.per_head_linear(x, reference.pack_weight(matrices.flatten(0, 1), scheme))  # type: ignore[arg-type]
    for head, matrix in enumerate(matrices):
        alone = linear.packed_linear(x[:, head], reference.pack_weight(matrix, scheme))  # type: ignore[arg-type]
        assert torch.equal(together[:, head], alone)


@needs_kernels
def test_mismatched_latent_attention_arguments_are_refused() -> None:
    latents = Latents([40])
    q, q_rope, cache, metadata, scale = latents.step([(0, 0, 40)])
    with pytest.raises(ValueError, match="do not meet a cache"):
        latent.latent_attention(q[..., :16], q_rope, cache, metadata, scale)
    metadata.block_tables[0, 1] = len(cache)
    with pytest.raises(IndexError, match="latent_attention: request 0 with rows"):
        latent.latent_attention(q, q_rope, cache, metadata, scale)
    with pytest.raises(ValueError, match="whole panels of 16 for each head"):
        latent.per_head_linear(torch.randn(2, 3, 8), reference.pack_weight(torch.randn(3 * 8, 8), FLOAT))
    positions, slots = torch.tensor([0, 9]), torch.tensor([0, cache.shape[0] * cache.shape[1]])
    rows, norm, table = torch.randn(2, 40), torch.ones(32), torch.randn(9, 8)
    before = cache[0, 0].clone()
    with pytest.raises(IndexError, match="1 tokens are outside the 9 positions"):
        latent.write_latents(positions, q_rope[:2], rows, norm, table, cache, torch.tensor([0, 1]), 1e-6)
    with pytest.raises(IndexError, match="1 tokens are outside"):
        latent.write_latents(torch.tensor([0, 1]), q_rope[:2], rows, norm, table, cache, slots, 1e-6)
    assert not torch.equal(cache[0, 0].nan_to_num(), before.nan_to_num()), "the token that fits is written"
    with pytest.raises(ValueError, match="norm must be contiguous"):
        latent.write_latents(positions, q_rope[:2], rows, norm[:8], table, cache, slots, 1e-6)
