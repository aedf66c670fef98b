# SPDX-License-Identifier: Apache-2.0
"""Test of the gain of prefix-aware routing, in simulated time."""

from __future__ import annotations

import pytest

from benchmarks.routing import measure


@pytest.mark.more
def test_prefix_routing_has_1_5_times_the_goodput_of_round_robin() -> None:
    prefix, others = (measure(policy, 4, 32, 28.0, 160) for policy in ("prefix", "round_robin"))
    assert prefix.in_time > 0.9
    assert prefix.goodput > 1.5 * others.goodput
    assert prefix.cached > others.cached
    assert measure("prefix", 4, 32, 28.0, 40) == measure("prefix", 4, 32, 28.0, 40), "no real time goes in"
