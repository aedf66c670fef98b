# SPDX-License-Identifier: Apache-2.0
"""Scans with a state: the same bits for any split into steps and in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, ops
from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu.library import set_num_threads
from tests.kernels.state_batches import NUM_BLOCKS, state_batch

pytestmark = pytest.mark.skipif(not cpu.available(), reason="torch's sums depend on the shape")

LENGTHS = (1, 9, 40, 75)
CHANNELS, STATES, TAPS, HEADS, GROUPS = 72, 16, 4, 6, 2
Layer = Callable[[Tensor, Tensor, StateMetadata], Tensor]
"""Of rows [T, 4 * CHANNELS], its states and the metadata: [T, CHANNELS]."""


def causal_conv() -> tuple[Layer, tuple[int, ...]]:
    weight, bias = torch.randn(TAPS, CHANNELS), torch.randn(CHANNELS)
    return (
        lambda rows, states, step: ops.causal_conv(rows[:, :CHANNELS], weight, bias, states, step, True),
        (TAPS - 1, CHANNELS),
    )


def selective_scan() -> tuple[Layer, tuple[int, ...]]:
    a, skip = -torch.randn(STATES, CHANNELS).exp(), torch.randn(CHANNELS)

    def run(rows: Tensor, states: Tensor, step: StateMetadata) -> Tensor:
        x, dt, gate, rest = rows.chunk(4, 1)
        b, c = rest[:, :STATES], rest[:, STATES : 2 * STATES]
        return ops.selective_scan(x, dt, a, b, c, skip, gate, states, step)

    return run, (STATES, CHANNELS)


def ssd_scan() -> tuple[Layer, tuple[int, ...]]:
    a, skip, dt_bias = -torch.randn(HEADS).exp(), torch.randn(HEADS), torch.randn(HEADS)

    def run(rows: Tensor, states: Tensor, step: StateMetadata) -> Tensor:
        x, bc, gate, dt = rows.split([CHANNELS, CHANNELS, CHANNELS, CHANNELS], 1)
        b, c = bc[:, : GROUPS * STATES], bc[:, GROUPS * STATES : 2 * GROUPS * STATES]
        return ops.ssd_scan(x, dt[:, :HEADS], a, b, c, skip, dt_bias, gate, states, step, groups=GROUPS)

    return run, (HEADS, STATES, CHANNELS // HEADS)


LAYERS = {"causal_conv": causal_conv, "selective_scan": selective_scan, "ssd_scan": ssd_scan}


def outputs(
    layer: Layer,
    shape: tuple[int, ...],
    sequences: Sequence[Tensor],
    next_size: Callable[[], int],
    num_drafts: int = 0,
) -> list[Tensor]:
    """Return a layer's outputs for a batch of sequences, each split into chunks of random, perhaps empty, size.

    Behind each chunk stand drafts, all of them wrong.
    """
    states = torch.full((NUM_BLOCKS, *shape), torch.nan)
    every = state_batch([(0, len(sequence)) for sequence in sequences], 4)
    done = [0] * len(sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    while any(start < len(sequence) for start, sequence in zip(done, sequences, strict=True)):
        ends = [min(start + next_size(), len(rows)) for start, rows in zip(done, sequences, strict=True)]
        chunks = [(start, end - start) for start, end in zip(done, ends, strict=True)]
        wrong = torch.randn(num_drafts, sequences[0].shape[1])
        rows = [
            torch.cat((rows[start:end], wrong[: num_drafts * (end > start)]))
            for rows, start, end in zip(sequences, done, ends, strict=True)
        ]
        drafts = [num_drafts if length else 0 for _, length in chunks]
        step = state_batch(chunks, 4, num_drafts=drafts)
        width = step.block_tables.shape[1]
        step.block_tables.copy_(every.block_tables[:, :width])
        made = layer(torch.cat(rows), states, step).split([len(part) for part in rows])
        for own, part, (_, length) in zip(parts, made, chunks, strict=True):
            own.append(part[:length])
        done = ends
    return [torch.cat(own) for own in parts]


@pytest.mark.parametrize("name", LAYERS)
def test_bits_depend_on_the_sequence_alone(name: str, restore_threads: None) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]()
    sequences = [torch.randn(length, 4 * CHANNELS) for length in LENGTHS]
    expected = [outputs(layer, shape, [sequence], lambda: 1000)[0] for sequence in sequences]
    assert all(part.isfinite().all() for part in expected)
    for seed in range(6):
        rng = random.Random(seed)
        set_num_threads(1 + seed % 2)
        got = outputs(
            layer, shape, sequences, partial(rng.randint, 0, 3 * seed + 1), num_drafts=seed // 2 * 3
        )
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_that_has_no_place_is_refused(name: str) -> None:
    layer, shape = LAYERS[name]()
    step = state_batch([(3, 5)], 4)
    step.block_tables[0, 1] = 0
    with pytest.raises(
        IndexError, match=f"{name}: request 0 with rows \\[0, 5\\), 8 tokens and blocks \\[1, 0\\]"
    ):
        layer(torch.randn(5, 4 * CHANNELS), torch.zeros(3, *shape), step)
