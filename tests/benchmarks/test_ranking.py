# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of document orders."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.embeddings.ranking import likeness, spearman


def test_ranks_correlate_by_spearmans_formula() -> None:
    draw = np.random.default_rng(1)
    for size in (2, 5, 60):
        one, other = draw.normal(size=size), draw.normal(size=size)
        places = [[sorted(numbers).index(number) for number in numbers] for numbers in (one, other)]
        squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
        assert spearman(one, other) == pytest.approx(1 - 6 * squares / (size * (size**2 - 1)))


def test_orders_are_alike_as_far_as_their_beginnings_are() -> None:
    exact = np.arange(40.0).reshape(2, 20)
    swapped = exact.copy()
    swapped[0, [18, 19]] = swapped[0, [19, 18]]
    swapped[1, [9, 10]] = swapped[1, [10, 9]]
    assert tuple(likeness(exact, exact)) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    found = likeness(exact, swapped)
    assert (found.same_first, found.same_of_ten) == (0.5, 0.95)
    assert found.mean == pytest.approx(found.least) == pytest.approx(1 - 12 / (20 * 399))
