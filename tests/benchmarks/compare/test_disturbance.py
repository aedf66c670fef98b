# SPDX-License-Identifier: Apache-2.0
"""The share of the machine that other programs took."""

from __future__ import annotations

import pytest

from benchmarks.compare import disturbance
from benchmarks.compare.disturbance import Times

STAT = "cpu  1000 0 200 5000 100 0 50 150 70 0\ncpu0 500 0 100 2500 50 0 25 75 35 0\nintr 1\n"


def test_steal_time_is_busy_and_vm_time_is_counted_once() -> None:
    assert disturbance.parse(STAT, 100) == (65.0, 14.0)


def test_share_of_others() -> None:
    before, after = Times(total=100, busy=40, own=10), Times(total=120, busy=58, own=26)
    assert after.others_share(before) == pytest.approx(0.1)


def test_own_time_that_is_counted_finer_is_no_negative_share() -> None:
    assert Times(10, 1.0, 1.01).others_share(Times(0, 0, 0)) == 0.0


def test_times_of_this_machine_can_be_read() -> None:
    before = disturbance.now()
    sum(range(10**7))
    after = disturbance.now()
    assert after.own > before.own
    assert after.total >= before.total
