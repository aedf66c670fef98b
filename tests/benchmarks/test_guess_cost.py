# SPDX-License-Identifier: Apache-2.0
"""Tests of the drafting cost benchmark: every kind of text is measured, and requests of many owners."""

from __future__ import annotations

from benchmarks.guess_cost import measured, texts


def test_every_kind_of_text_is_measured_for_both() -> None:
    costs = list(measured(num_tokens=400, num_asked=20, num_owners=60))
    assert len(costs) == 2 * len(texts(400)) + 2 + 1
    assert all(0 < cost.median <= cost.longest for cost in costs)
