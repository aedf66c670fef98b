# SPDX-License-Identifier: Apache-2.0
"""The C++ attention in both directions: near the oracle for every option, and the same bits in any company."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import reference_attention
from quire.kernels.attention_metadata import GroupMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from tests.fixtures.folded import folded
from tests.fixtures.threads import shuffle
from tests.kernels.op_cases import TOLERANCES

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu.bidirectional import bidirectional_attention

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LONGEST = 1400
LENGTHS = [90, 1, 0, 133, 16, 64, 600]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "narrow window": {"window": 1},
    "alibi": {"alibi_slopes": True},
    "relative bias": {"relative_bias": True},
    "all": {"window": 33, "alibi_slopes": True, "relative_bias": True},
}


def options(feature: str, heads: int) -> dict[str, Any]:
    made = dict(FEATURES[feature])
    if "alibi_slopes" in made:
        made["alibi_slopes"] = 0.1 / torch.arange(1, heads + 1)
    if "relative_bias" in made:
        made["relative_bias"] = numbers(7, heads, 2 * LONGEST - 1)
    return made


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequence(seed: int, length: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """Queries, keys and values, as one projection leaves them: [length, heads + 2 * kv_heads, size]."""
    return numbers(seed, length, heads + 2 * kv_heads, size).to(dtype)


def metadata_of(lengths: Sequence[int]) -> GroupMetadata:
    return GroupMetadata(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )


def attend(
    sequences: Sequence[Tensor], kv_heads: int, function: Any = bidirectional_attention, **features: Any
) -> Tensor:
    rows = torch.cat(list(sequences))
    heads, size = rows.shape[1] - 2 * kv_heads, rows.shape[2]
    parts = rows.split([heads, kv_heads, kv_heads], 1)
    result: Tensor = function(*parts, metadata_of(list(map(len, sequences))), size**-0.5, **features)
    return result


@folded("feature", list(FEATURES))
@folded(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (2, 2, 32), (3, 1, 256), (5, 5, 24), (4, 2, 8), (12, 4, 40)]
)
def test_shapes(heads: int, kv_heads: int, size: int, feature: str) -> None:
    for dtype in FLOATS:
        sequences = [sequence(i, length, heads, kv_heads, size, dtype) for i, length in enumerate(LENGTHS)]
        features = options(feature, heads)
        want = attend(sequences, kv_heads, reference_attention.bidirectional_attention, **features)
        rtol, atol = TOLERANCES[dtype]
        torch.testing.assert_close(attend(sequences, kv_heads, **features), want, rtol=rtol, atol=atol)


@folded("feature", list(FEATURES))
def test_the_oracle_is_torchs_attention(feature: str) -> None:
    features = options(feature, 4)
    rows = sequence(0, 50, 4, 4, 16, torch.float32)
    distance = torch.arange(50)[:, None] - torch.arange(50)
    mask = torch.zeros(4, 50, 50)
    if "alibi_slopes" in features:
        mask -= features["alibi_slopes"][:, None, None] * distance.abs()
    if "relative_bias" in features:
        mask += features["relative_bias"][:, LONGEST - 1 - distance]
    if "window" in features:
        mask[:, distance.abs() >= features["window"]] = -torch.inf
    q, k, v = (part.transpose(0, 1) for part in rows.chunk(3, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)
    got = attend([rows], 4, reference_attention.bidirectional_attention, **features)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=9), feature=st.sampled_from(list(FEATURES)))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_a_sequence_has_the_same_bits_in_any_company(lengths: list[int], feature: str) -> None:
    sequences = [sequence(i, length, 4, 2, 32, torch.float32) for i, length in enumerate(lengths)]
    together = attend(sequences, 2, **options(feature, 4)).split(lengths)
    for rows, mine in zip(sequences, together, strict=True):
        assert torch.equal(attend([rows], 2, **options(feature, 4)), mine)


@pytest.mark.usefixtures("restore_threads")
@folded("feature", list(FEATURES))
def test_threads_change_no_bit(feature: str) -> None:
    sequences = [sequence(i, length, 4, 2, 32, torch.float32) for i, length in enumerate((1300, 40, 1))]
    want = attend(sequences, 2, **options(feature, 4))
    for threads, order in [(1, 0), (2, 3), (3, 5)]:
        set_num_threads(threads)
        shuffle(order)
        assert torch.equal(attend(sequences, 2, **options(feature, 4)), want)


def test_rows_outside_all_sequences_are_not_read() -> None:
    """Rows of others are NaN, and so is what lies around keys, values and biases."""
    rows = torch.full((60, 6, 24), torch.nan)
    rows[20:43] = sequence(0, 23, 2, 2, 24, torch.float32)
    metadata = metadata_of([23])
    shifted = GroupMetadata(metadata.query_start_loc + 20, metadata.seq_lens, metadata.block_tables, 23, 23)
    bias = numbers(3, 2, 2 * 23 - 1)
    got = bidirectional_attention(*rows.chunk(3, 1), shifted, 24**-0.5, relative_bias=bias)
    assert torch.equal(got[20:43], attend([rows[20:43]], 2, relative_bias=bias))
    assert got[:20].count_nonzero() == got[43:].count_nonzero() == 0


def test_a_request_that_is_not_whole_is_refused() -> None:
    rows = sequence(0, 10, 2, 2, 8, torch.float32)
    part = metadata_of([10])
    part.seq_lens[0] = 12
    for function in (bidirectional_attention, reference_attention.bidirectional_attention):
        with pytest.raises(IndexError, match="request 0 has 10 rows of 12 tokens"):
            function(*rows.chunk(3, 1), part, 1.0)
        with pytest.raises(IndexError, match="request 0 has 10 tokens, and there are biases for 9"):
            attend([rows], 2, function, relative_bias=torch.zeros(2, 17))


def test_bad_options_are_refused() -> None:
    rows = sequence(0, 10, 2, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="window must be 1 or more; it is 0"):
        attend([rows], 2, window=0)
    with pytest.raises(ValueError, match=r"alibi_slopes must be floats \[2\]"):
        attend([rows], 2, alibi_slopes=torch.zeros(3))
    with pytest.raises(ValueError, match=r"relative_bias must be float32 \[2, 2 \* P - 1\]"):
        attend([rows], 2, relative_bias=torch.zeros(2, 20))
    with pytest.raises(ValueError, match="q, k and v are"):
        bidirectional_attention(rows, rows[:5], rows, metadata_of([10]), 1.0)
    with pytest.raises(IndexError, match="does not fit the rows of q"):
        bidirectional_attention(*rows.chunk(3, 1), metadata_of([11]), 1.0)
