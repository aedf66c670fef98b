# SPDX-License-Identifier: Apache-2.0
"""Number of drafts of a slow drafter: the one with the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.spec_decode.drafter import Draft, Text
from quire.spec_decode.speculation import Speculation, Verified
from quire.spec_decode.step_costs import StepCosts, choose_depth
from tests.spec_decode.test_draft_lengths import learned


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(0, 8),
    st.floats(0, 2),
    st.integers(0, 2),
)
@settings(derandomize=True, deadline=None)
def test_no_other_depth_gives_more_tokens_for_the_time(
    rates: list[float], most: int, seconds_each: float, num_ahead: int
) -> None:
    costs = learned(lambda width: 1.0 + 0.05 * width)
    num_requests = len(rates)

    def tokens_per_s(depth: int) -> float:
        places = range(num_ahead + 1, depth + 1)
        tokens = num_requests + sum(rate**place for rate in rates for place in places)
        return tokens / (costs.of(num_requests * (1 + len(places))) + depth * seconds_each)

    chosen = choose_depth(rates, most, num_requests, costs, seconds_each, num_ahead)
    assert chosen == 0 or num_ahead < chosen <= most
    candidates = [0, *range(num_ahead + 1, most + 1)]
    assert tokens_per_s(chosen) == pytest.approx(max(map(tokens_per_s, candidates)))


def test_no_drafts_are_requested_before_plain_steps_are_timed() -> None:
    assert choose_depth([0.9], 8, 1, StepCosts(), 0.0) == 0


class Slow:
    """Is always right, and says how often it was asked for how many."""

    keys: ClassVar[frozenset[str]] = frozenset()
    takes_time: ClassVar[bool] = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        self.asked.append(most)
        return [Draft([1] * most) for _ in texts]

    def forget(self, request_id: str) -> None:
        """It knows nothing."""


@pytest.mark.parametrize("adaptive", [True, False])
def test_slow_and_wrong_drafter_is_used_less(adaptive: bool) -> None:
    slow = Slow()
    speculation = Speculation({"slow": slow}, most=6, adaptive=adaptive)
    speculation.add_request("a", 1, ("", None))
    text, found = np.arange(4, dtype=np.int32), dict[str, list[int]]()
    for _ in range(60):
        drafts = found.get("a", [])
        verified = {"a": Verified(len(drafts), 0)} if drafts else {}
        speculation.note_step(verified, 1, 1 + len(drafts), 1e-3 * (1 + len(drafts)))
        found = {} if speculation.rests() else speculation.propose({"a": text})
    assert max(slow.asked) <= 6
    assert (len(slow.asked) < 40) is adaptive
