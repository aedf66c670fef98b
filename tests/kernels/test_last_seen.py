# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that see positions after their own, such as those of an image: definition, kernels and bits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import attention_backends, reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from tests.kernels.op_cases import last_seen, make_metadata, randn, randn_caches

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 70},
    "narrow window": {"sliding_window": 5},
    "cap and window": {"sliding_window": 33, "soft_cap": 4.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 2.0, 9.0])},
}
BATCHES = [[(9, 9)], [(5, 5), (1, 20), (17, 40), (0, 3)], [(300, 300), (7, 130), (1, 65)]]


def arguments(batch: list[tuple[int, int]], size: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    metadata = replace(make_metadata(batch, block_size=16, num_blocks=64), last_seen=last_seen(batch, size))
    tokens = int(metadata.query_start_loc[-1])
    return randn(tokens, 4, 24), *randn_caches(64, 2, 16, 24, torch.float32), metadata, 24**-0.5


@pytest.fixture(name="kernels")
def _kernels() -> Iterator[Any]:
    if library.loaded() is None:
        pytest.skip(library.status())
    from quire.kernels.cpu import attention

    threads = torch.get_num_threads()
    yield attention
    set_num_threads(threads)


def test_oracle_equals_masked_softmax() -> None:
    batch, size, window = [(12, 12)], 5, 4
    q, keys, values, metadata, scale = arguments(batch, size)
    got = reference.paged_attention(q, keys, values, metadata, scale, sliding_window=window)
    k, v = reference.gather_blocks(keys, values, metadata.block_tables, 12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    seen = ((j <= i) | (i // size == j // size)) & (j > i - window)
    scores = torch.einsum("ihd,hjd->hij", q, k[0].repeat_interleave(2, 0)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    want = torch.einsum("hij,hjd->ihd", weights, v[0].repeat_interleave(2, 0))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", [3, 64, 130])
def test_kernels_with_last_seen_equal_the_oracle(kernels: Any, size: int, feature: str) -> None:
    for batch in BATCHES:
        args = arguments(batch, size)
        got = kernels.paged_attention(*args, **FEATURES[feature])
        torch.testing.assert_close(got, reference.paged_attention(*args, **FEATURES[feature]))


def test_sdpa_backend_with_last_seen_equals_the_oracle() -> None:
    args = arguments(BATCHES[1], 6)
    got = attention_backends.paged_attention(*args, sliding_window=9)
    torch.testing.assert_close(got, reference.paged_attention(*args, sliding_window=9))


@pytest.mark.parametrize("feature", FEATURES)
def test_own_positions_as_last_seen_change_no_bit(kernels: Any, feature: str) -> None:
    for batch in BATCHES:
        q, keys, values, metadata, scale = arguments(batch, 1)
        plain = replace(metadata, last_seen=None)
        got = kernels.paged_attention(q, keys, values, metadata, scale, **FEATURES[feature])
        assert torch.equal(got, kernels.paged_attention(q, keys, values, plain, scale, **FEATURES[feature]))


@pytest.mark.parametrize("feature", FEATURES)
def test_bits_of_last_seen_depend_on_no_chunk_or_thread(kernels: Any, feature: str) -> None:
    size, length = 50, 300
    q, keys, values, metadata, scale = arguments([(length, length)], size)
    set_num_threads(1)
    whole = kernels.paged_attention(q, keys, values, metadata, scale, **FEATURES[feature])
    set_num_threads(3)
    for bounds in ([0, 300], [0, 50, 100, 300], [0, 150, 200, 250, 300]):
        parts: list[Tensor] = []
        for start, end in pairwise(bounds):
            chunk: AttentionMetadata = replace(
                make_metadata([(end - start, end)], 16, 64),
                block_tables=metadata.block_tables[:, : -(-end // 16)].contiguous(),
                last_seen=metadata.last_seen[start:end],
            )
            parts.append(
                kernels.paged_attention(q[start:end], keys, values, chunk, scale, **FEATURES[feature])
            )
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("bad", [[0, 0], [1, 2], [-1, 1]])
def test_kernels_refuse_last_seen_out_of_bounds(kernels: Any, bad: list[int]) -> None:
    q, keys, values, metadata, scale = arguments([(2, 2)], 1)
    wrong = replace(metadata, last_seen=torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(IndexError, match="last_seen"):
        kernels.paged_attention(q, keys, values, wrong, scale)


def test_last_seen_of_another_type_or_with_a_chunk_is_refused() -> None:
    q, keys, values, metadata, scale = arguments([(2, 2)], 1)
    with pytest.raises(ValueError, match="not both"):
        reference.paged_attention(q, keys, values, metadata, scale, attention_chunk=4)
    wrong = replace(metadata, last_seen=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be int32"):
        reference.paged_attention(q, keys, values, wrong, scale)
