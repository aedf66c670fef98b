# SPDX-License-Identifier: Apache-2.0
"""`StateRing` against a dictionary: steps of any rows and lengths, of which the last tokens may turn out wrong."""

from __future__ import annotations

import numpy as np
import torch

from quire.spec_decode.worker.proposer import StateRing, layout_of, positions_of
from quire.worker.cpu import CpuTransfers


def test_states_are_those_that_were_computed_last() -> None:
    draw = np.random.default_rng(3)
    kept, known = StateRing(6, 8, 1, torch.float32, CpuTransfers()), dict[tuple[int, int], float]()
    num_computed, highest = np.zeros(6, dtype=np.int64), np.zeros(6, dtype=np.int64)
    for number in range(60):
        rows = draw.permutation(6)[: draw.integers(1, 7)]
        starts = num_computed[rows]
        ends = starts + draw.integers(1, 6, len(rows))
        layout = layout_of(rows, starts, ends, num_prompt_tokens=starts)
        states = torch.arange(layout.num_tokens + 2).float()[:, None] + 100 * number
        kept.keep(layout, starts, states)
        places = zip(rows.repeat(ends - starts), positions_of(starts, ends - starts), strict=True)
        known.update(zip(places, states.flatten().tolist(), strict=False))
        num_computed[rows] = starts + draw.integers(1, ends - starts + 1)
        firsts = np.maximum(num_computed[rows] - draw.integers(1, 9, len(rows)), 0)
        highest[rows] = np.maximum(highest[rows], ends)
        firsts = np.maximum(firsts, highest[rows] - 8)
        counts = num_computed[rows] - firsts
        found = kept.at(rows.repeat(counts), positions_of(firsts, counts)).flatten().tolist()
        wanted = zip(rows.repeat(counts), positions_of(firsts, counts), strict=True)
        assert found == [known[place] for place in wanted]
