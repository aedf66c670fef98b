# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the oracle of each op, in Triton's interpreter: small shapes, all branches.

float32 and float16 only: the interpreter's `tl.dot` on bfloat16 is wrong. Linears and sampling have files of their own.
"""

# mypy: disable-error-code="arg-type"

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels import ops, reference
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.triton import attention, bidirectional, elementwise, rotary
from quire.kernels.triton.batch import copy_blocks
from tests.fixtures.quick import quick
from tests.kernels.op_cases import compare, last_seen, make_metadata, randn, randn_caches

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are meant
DTYPES = [torch.float32, torch.float16]
"""What the interpreter gets right."""

ROWWISE: dict[str, Callable[..., Any]] = {
    "rms_norm": elementwise.rms_norm,
    "fused_add_rms_norm": elementwise.fused_add_rms_norm,
    "layer_norm": elementwise.layer_norm,
    "fused_add_layer_norm": elementwise.fused_add_layer_norm,
    "activate": elementwise.activate,
    "silu_and_mul": elementwise.silu_and_mul,
    "gelu_and_mul": elementwise.gelu_and_mul,
    "write_kv": rotary.write_kv,
    "embedding": elementwise.embedding,
    "bidirectional_attention": bidirectional.bidirectional_attention,
}
"""Ops whose own cases are small enough for an interpreter."""


def in_float(*args: Any, **_kwargs: Any) -> bool:
    """No int8 cache on a GPU."""
    return all(getattr(arg, "dtype", None) != torch.int8 for arg in args)


@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.float16]), ids=str)
@pytest.mark.parametrize("name", list(ROWWISE))
def test_rowwise(name: str, dtype: torch.dtype) -> None:
    compare(ops.TABLE[name], ROWWISE[name], dtype, "cpu", in_float)


@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.float16]), ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm_weights", [None, "of the heads' dtype", "in float32"])
@pytest.mark.parametrize(("heads", "size", "rot_dim"), [((3, 1), 20, 6), ((4, 2), 16, 16)])
def test_norms_rotary_and_write(
    heads: tuple[int, int],
    size: int,
    rot_dim: int,
    norm_weights: str | None,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    """Near the oracle, and with the bits of one kernel after the other."""
    torch.manual_seed(0)
    qkv = randn(5, (heads[0] + 2 * heads[1]) * size, dtype=dtype)
    slots, positions, table = torch.tensor([7, -1, 0, 22, 9]), torch.randint(0, 50, (5,)), randn(50, rot_dim)
    caches = randn_caches(6, heads[1], 4, size, dtype)
    norm_dtype = torch.float32 if norm_weights == "in float32" else dtype
    norms = () if norm_weights is None else (*randn(2, size, dtype=norm_dtype), 1e-5)

    def run(op: Callable[..., None]) -> list[Tensor]:
        q, k, v = qkv.clone().split([heads[0] * size, heads[1] * size, heads[1] * size], 1)
        views = [part.unflatten(1, (-1, size)) for part in (q, k, v)]
        written = [cache.clone() for cache in caches]
        op(positions, *views, table, *written, slots, interleaved, *norms)
        return [*views, *written]

    def one_by_one(positions: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *rest: Any) -> None:
        k_cache, v_cache, slots, interleaved, *norms = rest
        for heads, weight in zip((q, k), norms[:2], strict=False):
            heads.copy_(elementwise.rms_norm(heads, weight, norms[2]))
        rotary.rotary_embedding(positions, q, k, table, interleaved)
        rotary.write_kv(k, v, k_cache, v_cache, slots)

    fused = run(rotary.rotary_and_write_kv)
    for got, want in zip(fused, run(reference.rotary_and_write_kv), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)
    assert all(map(torch.equal, fused, run(one_by_one)))


BATCHES = {
    "empty": [],
    "decode": [(1, 9), (1, 33), (1, 16)],
    "mixed": [(5, 5), (1, 20), (17, 40), (0, 3)],
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    "all": {"sliding_window": 18, "soft_cap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    "bias": {"relative_bias": torch.linspace(-2, 2, 4 * 79).sin().view(4, 79), "soft_cap": 3.0},
    "chunk and sinks": {"attention_chunk": 7, "sinks": torch.tensor([-1.0, 0.5, 2.0, 9.0])},
}
DECODE = attention.decode_shape(2, 24)
QUERY = torch.empty(1, 4, 24)
SHAPES = {
    "fastest": (DECODE, attention.prefill_shape(QUERY.half(), 2, 200)),
    "medium": (DECODE._replace(part_tokens=64, block_n=16), attention.prefill_shape(QUERY, 2, 100)),
    "small": (
        DECODE._replace(part_tokens=16, block_n=16, most_parts=3),
        attention.prefill_shape(QUERY, 2, 17)._replace(block_n=16),
    ),
    "invariant": tuple(
        attention.invariant_shape(2, one_query=one)._replace(part_tokens=32) for one in (True, False)
    ),
}


def attend(shapes: str) -> Callable[..., Tensor]:
    def run(*args: Any, **features: Any) -> Tensor:
        return attention.attend(*args, *SHAPES[shapes], **features)

    return run


@pytest.mark.parametrize("dtype", quick(DTYPES, [torch.float16]), ids=str)
@pytest.mark.parametrize("feature", quick(FEATURES, ("plain", "all", "bias", "chunk and sinks")))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_attention(shape: str, feature: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for batch in BATCHES.values():
        metadata = make_metadata(batch, block_size=8, num_blocks=16)
        q = randn(int(metadata.query_start_loc[-1]), 3, 4, 24, dtype=dtype)[:, 1]
        args = (q, *randn_caches(16, 2, 8, 24, dtype), metadata, 24**-0.5)
        got, want = (
            attend(shape)(*args, **FEATURES[feature]),
            reference.paged_attention(*args, **FEATURES[feature]),
        )
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "feature"),
    quick(
        [(shape, name) for shape in SHAPES for name in FEATURES if "chunk" not in name],
        [*((shape, "all") for shape in SHAPES), ("fastest", "plain"), ("small", "plain")],
    ),
)
def test_attention_of_rows_that_see_ahead(shape: str, feature: str) -> None:
    torch.manual_seed(0)
    for name, sizes in (("decode", (1, 6)), ("mixed", (1, 6, 16))):
        batch = BATCHES[name]
        for size in sizes:
            metadata = replace(
                make_metadata(batch, block_size=8, num_blocks=16), last_seen=last_seen(batch, size)
            )
            q = randn(int(metadata.query_start_loc[-1]), 4, 24)
            args = (q, *randn_caches(16, 2, 8, 24, torch.float32), metadata, 24**-0.5)
            got = attend(shape)(*args, **FEATURES[feature])
            want = reference.paged_attention(*args, **FEATURES[feature])
            torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)
            if size == 1:
                plain = (*args[:3], replace(metadata, last_seen=None), args[4])
                assert torch.equal(got, attend(shape)(*plain, **FEATURES[feature]))


@pytest.mark.parametrize(
    "feature", [{"sliding_window": 0}, {"soft_cap": 0.0}, {"alibi_slopes": torch.ones(3)}]
)
def test_attention_refuses_features_that_mean_nothing(feature: dict[str, Any]) -> None:
    metadata = make_metadata([(1, 9)], block_size=8, num_blocks=16)
    args = (randn(1, 4, 24), *randn_caches(16, 2, 8, 24, torch.float32), metadata, 24**-0.5)
    with pytest.raises(ValueError, match=f"{next(iter(feature))} must be"):
        attention.invariant_paged_attention(*args, **feature)


@pytest.mark.more
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("feature", ["plain", "window"])
def test_decode_attention_with_padding(shape: str, feature: str) -> None:
    """Requests of no tokens give zeros, keys may be stored [slot, D], and no launch depends on the lengths."""
    torch.manual_seed(0)
    metadata = make_metadata([(1, 9), (1, 40), (1, 1)], block_size=8, num_blocks=16)
    q, (k_cache, v_cache) = randn(5, 4, 24), randn_caches(16, 2, 8, 24, torch.float32)
    stored = k_cache.transpose(2, 3).contiguous().transpose(2, 3)
    padded = AttentionMetadata(
        query_start_loc=torch.arange(6, dtype=torch.int32),
        seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, 2)),
        block_tables=torch.nn.functional.pad(metadata.block_tables, (0, 0, 0, 2)),
        slot_mapping=torch.full((5,), -1),
        max_query_len=1,
        max_seq_len=200,
    )
    got = attend(shape)(q, stored, v_cache, padded, 24**-0.5, **FEATURES[feature])
    want = reference.paged_attention(q[:3], k_cache, v_cache, metadata, 24**-0.5, **FEATURES[feature])
    torch.testing.assert_close(got[:3], want, rtol=2e-3, atol=1e-3)
    assert not got[3:].any()


@pytest.mark.more
@pytest.mark.parametrize("feature", ["plain", "all"])
def test_decoding_request_has_the_same_bits_in_any_batch(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others, beside prompts, in a launch for longer ones, and with programs that take parts in turns."""
    torch.manual_seed(0)
    caches = randn_caches(16, 2, 8, 24, torch.float16)
    q, alone = randn(1, 4, 24, dtype=torch.float16), make_metadata([(1, 77)], 8, 16)

    def run(others: list[tuple[int, int]], max_seq_len: int = 77) -> Tensor:
        batch = make_metadata([(1, 77), *others], 8, 16)
        batch = replace(batch, max_seq_len=max_seq_len)
        batch.block_tables[0, :10] = alone.block_tables[0, :10]
        queries = torch.cat([q, randn(sum(length for length, _ in others), 4, 24, dtype=torch.float16)])
        return attend("small")(queries, *caches, batch, 24**-0.5, **FEATURES[feature])[0]

    expected = run([])
    for others in ([(1, 20)], [(1, 1), (5, 30)], [(3, 3)]):
        assert torch.equal(run(others), expected), others
    assert torch.equal(run([], 4000), expected)
    monkeypatch.setattr(attention, "MIN_PROGRAMS_OF_A_REQUEST", 2)
    assert torch.equal(run([(1, 20)]), expected)


@pytest.mark.more
@pytest.mark.parametrize("window", [None, 45])
def test_invariant_attention_has_same_bits_in_batches_and_chunks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "INVARIANT_PART_TOKENS", 32)
    monkeypatch.setattr(attention, "PARTS_AT_ONCE", 2)
    torch.manual_seed(0)
    length, caches = 77, randn_caches(16, 2, 8, 24, torch.float16)
    q, whole = randn(length, 4, 24, dtype=torch.float16), make_metadata([(77, 77)], 8, 16)

    def run(start: int, end: int, extra: int) -> Tensor:
        """Queries start to end, in a batch with `extra` requests of one token behind them."""
        batch = make_metadata([(end - start, end), *[(1, 1)] * extra], 8, 16)
        width = batch.block_tables.shape[1]
        batch.block_tables[0] = whole.block_tables[0, :width]
        queries = torch.cat([q[start:end], q[:extra]])
        run = attention.invariant_paged_attention
        return run(queries, *caches, batch, 24**-0.5, sliding_window=window)[: end - start]

    expected = run(0, length, 0)
    for start, end, extra in [(0, 20, 0), (20, 77, 2), (33, 34, 0), (76, 77, 0), (76, 77, 3), (64, 65, 1)]:
        assert torch.equal(run(start, end, extra), expected[start:end]), (start, end, extra)


BOTH_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 60},
    "narrow": {"window": 5},
    "all": {
        "window": 50,
        "alibi_slopes": FEATURES["alibi"]["alibi_slopes"],
        "relative_bias": torch.linspace(-1, 1, 4 * 159).view(4, 159),
    },
}


@pytest.mark.parametrize("feature", quick(BOTH_WAYS, ("plain", "all")))
@pytest.mark.parametrize("head_size", [16, 24])
def test_attention_in_both_directions_over_many_tiles(
    head_size: int, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs match the oracle where all queries see all keys, and where a window hides some."""
    monkeypatch.setattr(bidirectional, "BLOCK_N", 16)
    torch.manual_seed(0)
    metadata = make_metadata([(80, 80), (3, 3), (33, 33)], block_size=64, num_blocks=6)
    rows = randn(116, 8, head_size, dtype=torch.float16).split([4, 2, 2], 1)
    run, oracle = bidirectional.bidirectional_attention, ops.bidirectional_attention.oracle
    got, want = (op(*rows, metadata, 0.2, **BOTH_WAYS[feature]) for op in (run, oracle))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)


def e4m3(*shape: int) -> Tensor:
    """Random numbers that E4M3 holds: the interpreter rounds others wrongly."""
    return randn(*shape).to(torch.float8_e4m3fn).float()


def test_a_cache_in_e4m3() -> None:
    """Written with its limits, by kernel and oracle alike, and read for prompts and decode steps."""
    torch.manual_seed(0)
    caches = [part.to(torch.float8_e4m3fn) for part in randn_caches(16, 2, 8, 24, torch.float32)]
    k, v, slots = e4m3(40, 2, 24), e4m3(40, 2, 24), torch.randperm(16 * 8)[:40]
    k[0, 0, :3], v[1, 1, 5] = torch.tensor([1e4, -1e4, 449.0]), -torch.inf
    written = {run: [part.clone() for part in caches] for run in (rotary.write_kv, reference.write_kv)}
    for run, parts in written.items():
        run(k, v, *parts, slots)
    for ours, theirs in zip(*written.values(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.0, atol=0.0)
    keys, _ = written[rotary.write_kv]
    block, offset = divmod(int(slots[0]), 8)
    assert keys[block, 0, :3, offset].float().tolist() == [448.0, -448.0, 448.0]
    for batch, shape in [("decode", "small"), ("mixed", "fastest")]:
        metadata = make_metadata(BATCHES[batch], block_size=8, num_blocks=16)
        q = randn(int(metadata.query_start_loc[-1]), 4, 24, dtype=torch.float16)
        args = (q, *caches, metadata, 24**-0.5)
        want = reference.paged_attention(*args)
        torch.testing.assert_close(attend(shape)(*args), want, rtol=2e-3, atol=2e-3)


def test_copy_blocks() -> None:
    source, target = randn(6, 2, 700), torch.zeros(8, 2, 700)
    copy_blocks(target, source, torch.tensor([[1, 7], [3, 0]]))
    assert torch.equal(target[7], source[1])
    assert torch.equal(target[0], source[3])
    assert not target[1:7].any()
