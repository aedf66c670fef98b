# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.reference_sampling import philox4x32, uniform
from tests.worker import sampler_oracle

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


def test_known_answers() -> None:
    """The vectors published with the authors' library."""
    ones = 0xFFFFFFFF
    counters = [[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]]
    keys = [[0] * 2, [ones] * 2, [0xA4093822, 0x299F31D0]]
    words = philox4x32(np.array(counters, dtype=np.uint64).T, np.array(keys, dtype=np.uint64).T)
    assert words.T.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=5))
def test_uniform_equals_oracle(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = np.array(pairs, dtype=np.int64).T
    assert uniform(seeds, positions).tolist() == [sampler_oracle.uniform(*pair) for pair in pairs]


def test_uniform_is_uniform() -> None:
    positions = np.arange(20_000)
    drawn = uniform(np.full(20_000, 42), positions)
    assert 0 <= drawn.min() < 1e-3
    assert 0.999 < drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_nearby_seeds_are_unrelated() -> None:
    seeds = np.arange(20_000)
    drawn = uniform(seeds, np.zeros(20_000, dtype=np.int64))
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
