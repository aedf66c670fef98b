# SPDX-License-Identifier: Apache-2.0
"""Prompts and arrival times follow from the seed."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from quire.bench.workload import arrival_times, random_prompts


def test_prompts_have_the_requested_shape_and_ids() -> None:
    prompts = random_prompts(5, 7, [3, 5, 8], seed=0)
    assert [len(prompt) for prompt in prompts] == [7] * 5
    assert {token for prompt in prompts for token in prompt} == {3, 5, 8}
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_the_seed_decides_and_global_randomness_is_left_alone() -> None:
    random.seed(1)
    before = random.getstate()
    assert random_prompts(3, 4, range(100), seed=2) == random_prompts(3, 4, range(100), seed=2)
    assert random_prompts(3, 4, range(100), seed=2) != random_prompts(3, 4, range(100), seed=3)
    assert arrival_times(9, 2.0, seed=2) == arrival_times(9, 2.0, seed=2)
    assert random.getstate() == before


def test_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num_requests", [0, 1, 2, 50])
def test_number_of_arrivals(num_requests: int) -> None:
    assert len(arrival_times(num_requests, 4.0, seed=0)) == num_requests


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times(20_001, 4.0, seed=0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.03), "exponential gaps: deviation equals mean"
