# SPDX-License-Identifier: Apache-2.0
"""Recurrences over tokens: against formulas of others, and by their bits however a sequence is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from tests.kernels.state_batches import NUM_BLOCKS, state_batch

KEY_HEADS, VALUE_HEADS, KEYS, VALUES = 2, 4, 16, 48
LENGTH = 83
BLOCK_SIZE = 8
CHUNKS = ([LENGTH], [1] * LENGTH, [7, 1, 8, 16, 40, 11], [64, 19])

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


@pytest.fixture
def restore_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    set_num_threads(count)


def delta_inputs(length: int, steps: int = 1) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the inputs of rows and the parameters of heads, with `steps` time steps per row."""
    random = torch.Generator().manual_seed(length)
    widths = (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES, VALUE_HEADS * (1 + steps))
    qkv, ba = (torch.randn(length, width, generator=random) for width in widths)
    return (qkv, ba), (
        -torch.rand(VALUE_HEADS, generator=random) * 4,
        torch.randn(VALUE_HEADS * steps, generator=random),
    )


def test_the_gated_delta_rule_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    (qkv, ba), (rates, dt_bias) = delta_inputs(LENGTH)
    q, k, v = qkv.split((KEY_HEADS * KEYS, KEY_HEADS * KEYS, VALUE_HEADS * VALUES), 1)
    q, k = (part.view(1, LENGTH, KEY_HEADS, KEYS) for part in (q, k))
    b, a = ba.chunk(2, 1)
    gates = {
        "g": (rates * torch.nn.functional.softplus(a + dt_bias))[None],
        "beta": b.sigmoid()[None],
        "initial_state": None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    states = torch.full((NUM_BLOCKS, VALUE_HEADS, KEYS, VALUES), torch.nan)
    metadata = state_batch([(0, LENGTH)], BLOCK_SIZE)
    out = ops.gated_delta.oracle(qkv, ba, rates, dt_bias, states, metadata)
    last = states[metadata.block_tables[0, -1]]
    for rule in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        expected, state = rule(q, k, v.view(1, LENGTH, VALUE_HEADS, VALUES), **gates)
        torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(last, state[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("least", [None, -5.0])
def test_a_decay_by_channels_is_that_of_transformers(least: float | None) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    (qkv, ba), (rates, dt_bias) = delta_inputs(LENGTH, KEYS)
    q, k, v = qkv.split((KEY_HEADS * KEYS, KEY_HEADS * KEYS, VALUE_HEADS * VALUES), 1)
    shared = VALUE_HEADS // KEY_HEADS
    q, k = (part.view(1, LENGTH, KEY_HEADS, KEYS).repeat_interleave(shared, 2) for part in (q, k))
    strengths, steps = ba.split((VALUE_HEADS, VALUE_HEADS * KEYS), 1)
    steps, rate = (steps + dt_bias).view(1, LENGTH, VALUE_HEADS, KEYS), rates[:, None]
    decays = (
        rate * torch.nn.functional.softplus(steps) if least is None else least * (-rate * steps).sigmoid()
    )
    states = torch.full((NUM_BLOCKS, VALUE_HEADS, KEYS, VALUES), torch.nan)
    metadata = state_batch([(0, LENGTH)], BLOCK_SIZE)
    out = ops.gated_delta.oracle(qkv, ba, rates, dt_bias, states, metadata, strongest=2.0, least=least)
    expected, _ = theirs.recurrent_kimi_delta_attention(
        q,
        k,
        v.view(1, LENGTH, VALUE_HEADS, VALUES),
        g=decays,
        beta=2 * strengths.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=2e-5)


def in_chunks(
    function: Callable[..., Tensor],
    rows: Sequence[Tensor],
    of_heads: Sequence[Any],
    chunks: Sequence[int],
    *state: int,
) -> tuple[Tensor, Tensor]:
    """Results, and the states that the table of the sequence ends up with."""
    whole = state_batch([(0, LENGTH)], BLOCK_SIZE)
    states = torch.full((NUM_BLOCKS, *state), torch.nan)
    done, parts = 0, []
    for size in chunks:
        ends = torch.tensor([done + size], dtype=torch.int32)
        bounds = torch.tensor([0, size], dtype=torch.int32)
        step = StateMetadata(bounds, ends, whole.block_tables, size, done + size, BLOCK_SIZE)
        parts.append(function(*(part[done : done + size] for part in rows), *of_heads, states, step))
        done += size
    return torch.cat(parts), states[whole.block_tables[0].long()]


@needs_kernels
@pytest.mark.parametrize("steps", [1, KEYS])
def test_chunks_of_a_sequence_have_the_same_bits(steps: int) -> None:
    rows, of_heads = delta_inputs(LENGTH, steps)
    state = (VALUE_HEADS, KEYS, VALUES)
    out, states = in_chunks(ops.gated_delta, rows, of_heads, CHUNKS[0], *state)
    assert out.isfinite().all()
    assert states.isfinite().all()
    for chunks in CHUNKS[1:]:
        again, again_states = in_chunks(ops.gated_delta, rows, of_heads, chunks, *state)
        assert torch.equal(again, out)
        assert torch.equal(again_states, states)


@needs_kernels
def test_request_has_the_same_bits_in_any_batch_and_threads(
    restore_threads: None,
) -> None:
    chunks = [(0, 40), (9, 1), (16, 30), (3, 0), (5, 12)]
    (qkv, ba), of_heads = delta_inputs(sum(length for _, length in chunks))
    step = state_batch(chunks, BLOCK_SIZE)
    before = torch.randn(NUM_BLOCKS, VALUE_HEADS, KEYS, VALUES)
    results = []
    for count in (1, 2, 4):
        set_num_threads(count)
        states = before.clone()
        results.append((ops.gated_delta(qkv, ba, *of_heads, states, step), states))
    (out, after), bounds = results[0], step.query_start_loc.tolist()
    for again, again_after in results[1:]:
        assert torch.equal(again, out)
        assert torch.equal(again_after, after)
    for request, (first, last) in enumerate(pairwise(bounds)):
        alone = StateMetadata(
            torch.tensor([0, last - first], dtype=torch.int32),
            step.seq_lens[request : request + 1],
            step.block_tables[request : request + 1],
            last - first,
            step.max_seq_len,
            BLOCK_SIZE,
        )
        states = before.clone()
        assert torch.equal(
            ops.gated_delta(qkv[first:last], ba[first:last], *of_heads, states, alone), out[first:last]
        )


@needs_kernels
def test_rwkv7_has_the_same_bits_in_any_chunks_and_threads(
    restore_threads: None,
) -> None:
    random, heads, size = torch.Generator().manual_seed(3), 3, 48
    rows = [torch.randn(LENGTH, heads * size, generator=random) for _ in range(5)]
    of_heads = torch.randn(5, heads * size, generator=random)

    def rwkv7(*args: Any) -> Tensor:
        return ops.rwkv7(*args, 1e-4)

    out, states = in_chunks(rwkv7, rows, [of_heads], CHUNKS[0], heads, size, size)
    assert out.isfinite().all()
    for count, chunks in zip((1, 2, 4), CHUNKS[1:], strict=True):
        set_num_threads(count)
        again, again_states = in_chunks(rwkv7, rows, [of_heads], chunks, heads, size, size)
        assert torch.equal(again, out)
        assert torch.equal(again_states, states)
