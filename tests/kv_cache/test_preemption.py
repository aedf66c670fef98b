# SPDX-License-Identifier: Apache-2.0
import pytest

from quire.kv_cache.manager import PREEMPTION_MODES
from quire.kv_cache.spec import SwapCosts

COSTS = SwapCosts(copied_bytes_per_s=1000.0, computed_tokens_per_s=10.0)


@pytest.mark.parametrize(
    ("mode", "num_bytes", "expected"),
    [("auto", 2499, True), ("auto", 2500, False), ("swap", 10**9, True), ("recompute", 1, False)],
)
def test_fifty_tokens_of_five_seconds_swap_if_copies_are_faster(mode, num_bytes, expected):
    assert PREEMPTION_MODES[mode](COSTS, num_bytes, 50) is expected
