# SPDX-License-Identifier: Apache-2.0
"""The GPU's latent attention in Triton's interpreter: against the oracle, and itself in other batches and chunks.

float32 and float16 only: the interpreter's `tl.dot` on bfloat16 is wrong.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels import ops, reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.linear import WeightScheme
from quire.kernels.triton import latent, launch, linear
from tests.fixtures.quick import quick
from tests.kernels.op_cases import close, make_metadata, randn

DTYPES = [torch.float32, torch.float16]
"""What the interpreter gets right."""
SCHEMES = [
    WeightScheme(fast=False),
    WeightScheme("int8"),
    WeightScheme("int4", 32),
    WeightScheme("fp8"),
    WeightScheme("fp8", 128),
]
BATCHES = {
    "empty": [],
    "decode": [(1, 9), (1, 33), (1, 16)],
    "mixed": [(5, 5), (1, 20), (17, 40), (0, 3)],
}
HEADS = {"one tile": 5, "two tiles": 40}


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(latent, "KEYS", 16)


@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.float16]), ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_per_head_linear(scheme: WeightScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, inputs, outputs = 3, 45, 20
    packed = linear.pack_weight(randn(heads * outputs, inputs) * inputs**-0.5, scheme)
    exact = linear.pack_weight(reference.unpack_weight(packed).float(), SCHEMES[0])
    for tokens in (0, 1, 70):
        # Of E4M3, and with a scale of 1/64: the interpreter rounds others wrongly.
        x = randn(tokens, heads, inputs + 5).to(torch.float8_e4m3fn).to(dtype)[..., 5:]
        x[..., 0] = 7.0
        got = latent.per_head_linear(x, packed)
        want = ops.per_head_linear.oracle(x.float(), exact)
        torch.testing.assert_close(got.float(), want, rtol=4e-3, atol=4e-3)
        for rows in (slice(0, 1), slice(5, 8)):
            assert torch.equal(latent.per_head_linear(x[rows], packed), got[rows])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_latents(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    for tokens, heads, rank, rope in [(0, 2, 16, 8), (9, 4, 50, 6)]:
        slots = torch.randperm(16 * 4)[:tokens]
        slots[1::3] = -1
        rows = randn(tokens, 10 + rank + rope, dtype=dtype)[:, 10:]
        queries, table = randn(tokens, heads, 24 + rope, dtype=dtype), randn(50, rope)
        positions = torch.randint(0, 50, (tokens,))
        for cache_dtype, norm_dtype in [(dtype, torch.float32), (torch.float32, dtype)]:
            norm, stale = randn(rank, dtype=norm_dtype), randn(16, 4, rank + rope, dtype=cache_dtype)
            results = []
            for write in (latent.write_latents, ops.write_latents.oracle):
                q, cache = queries.clone(), stale.clone()
                write(positions, q[..., 24:], rows, norm, table, cache, slots, 1e-5, interleaved)
                results.append((q, cache))
            for got, want in zip(*results, strict=True):
                close(got, want, dtype)


def operands(
    tokens: int, heads: int, dtype: torch.dtype, rank: int = 50, rope: int = 10
) -> tuple[Tensor, ...]:
    """Queries, which are views, and a cache of 16 blocks of 8."""
    q, q_rope = randn(tokens, heads, rank, dtype=dtype), randn(tokens, heads, 24 + rope, dtype=dtype)
    return q, q_rope[..., 24:], randn(16, 8, rank + rope, dtype=dtype)


@pytest.fixture(params=[1, 132], ids=["in order", "side by side"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more of them, a decode step makes its parts side by side."""
    monkeypatch.setattr(launch, "num_processors", lambda device: request.param)


@pytest.mark.more
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_latent_attention(batch: list[tuple[int, int]], heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    metadata = make_metadata(batch, block_size=8, num_blocks=16)
    q, q_rope, cache = operands(int(metadata.query_start_loc[-1]), heads, dtype)
    for cache_dtype in {dtype, torch.float32}:
        args = (q, q_rope, cache.to(cache_dtype), metadata, 0.1)
        close(latent.latent_attention(*args), ops.latent_attention.oracle(*args), dtype)


@pytest.mark.usefixtures("processors")
def test_padding_of_a_decode_step_gives_zeros() -> None:
    torch.manual_seed(0)
    metadata = make_metadata([(1, 9), (1, 40)], block_size=8, num_blocks=16)
    padded = AttentionMetadata(
        query_start_loc=torch.arange(4, dtype=torch.int32),
        seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, 1)),
        block_tables=torch.nn.functional.pad(metadata.block_tables, (0, 0, 0, 1), value=99),
        slot_mapping=torch.full((3,), -1),
        max_query_len=1,
        max_seq_len=64,
    )
    q, q_rope, cache = operands(3, 5, torch.float32)
    got = latent.latent_attention(q, q_rope, cache, padded, 0.1)
    close(got[:2], ops.latent_attention.oracle(q[:2], q_rope[:2], cache, metadata, 0.1), torch.float32)
    assert not got[2:].any()


@pytest.mark.more
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_query_has_the_same_bits_in_any_batch_and_chunk(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    length = 77
    (q, q_rope, cache), whole = operands(length, heads, torch.float16), make_metadata([(77, 77)], 8, 16)

    def run(start: int, end: int, extra: int, processors: int = 132) -> Tensor:
        """Queries start to end, in a batch with `extra` requests of one token behind them."""
        monkeypatch.setattr(launch, "num_processors", counted(processors))
        batch = make_metadata([(end - start, end), *[(1, 1)] * extra], 8, 16)
        batch.block_tables[0] = whole.block_tables[0, : batch.block_tables.shape[1]]
        queries = [torch.cat([part[start:end], part[:extra]]) for part in (q, q_rope)]
        return latent.latent_attention(*queries, cache, batch, 0.1)[: end - start]

    expected = run(0, length, 0)
    chunks = [(0, 20, 0), (20, 77, 2), (33, 34, 0), (76, 77, 3), (76, 77, 0, 1), (64, 65, 1)]
    for chunk in chunks:
        assert torch.equal(run(*chunk), expected[chunk[0] : chunk[1]]), chunk


def counted(processors: int) -> Callable[[torch.device], int]:
    return lambda device: processors
