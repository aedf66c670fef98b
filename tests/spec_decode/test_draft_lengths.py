# SPDX-License-Identifier: Apache-2.0
"""Tests of the number of drafts to verify: the one with the most tokens per second, and none if none pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.spec_decode.drafter import CERTAIN, Draft, Text
from quire.spec_decode.speculation import (
    LONGEST_REST,
    SHARE,
    SHORTEST_REST,
    TRIAL_STEPS,
    Acceptance,
    DraftingBalance,
    Speculation,
    Verified,
)
from quire.spec_decode.step_costs import HOPE, WIDEST, StepCosts, choose_lengths
from tests.spec_decode.manual_clocks import ManualClocks

Cost = Callable[[int], float]


def learned(cost: Cost, widths: Sequence[int] = range(1, 40)) -> StepCosts:
    costs = StepCosts()
    for width in widths:
        costs.note(1, width, 99.0)  # recorded, and not counted
        costs.note(1, width, cost(width))
    return costs


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
@settings(derandomize=True, deadline=None)
def test_no_other_choice_gives_more_tokens_for_the_time(
    drafts: list[tuple[float, int]], rises: list[float]
) -> None:
    times = [1.0, *itertools.accumulate(rises, initial=1.0)]
    costs = learned(lambda width: times[width], range(1, 21))

    def tokens_per_s(lengths: Sequence[int]) -> float:
        expected = len(drafts) + sum(
            rate**place
            for (rate, _), length in zip(drafts, lengths, strict=True)
            for place in range(1, length + 1)
        )
        return expected / times[len(drafts) + sum(lengths)]

    chosen = choose_lengths([rate for rate, _ in drafts], [most for _, most in drafts], len(drafts), costs)
    best = max(map(tokens_per_s, itertools.product(*(range(most + 1) for _, most in drafts))))
    assert tokens_per_s(chosen) == pytest.approx(best)


def test_until_plain_steps_were_timed_nothing_is_chosen() -> None:
    assert choose_lengths([0.9], [8], 1, StepCosts()) == [0]
    assert choose_lengths([0.9], [8], 1, learned(lambda width: 1.0, [1])) != [0]
    assert choose_lengths([0.9], [8], 2, learned(lambda width: 1.0, [1])) == [0]
    assert choose_lengths([0.9], [8], WIDEST + 1, learned(lambda width: 1.0, [WIDEST])) == [0]


def test_tokens_of_in_flight_steps_are_not_drafted() -> None:
    costs = learned(lambda width: 1.0 if width < 4 else 9.0)
    assert choose_lengths([0.9, 0.2], [8, 1], 2, costs, num_ahead=1) == [2, 0]
    assert choose_lengths([0.9, 0.2], [8, 8], 2, costs, num_ahead=1) == [2, 0]


def test_costs_are_learned_and_new_widths_tried() -> None:
    costs = learned(lambda width: float(width), [2, 6])
    assert not costs.is_known(1)
    assert costs.is_known(6)
    assert [costs.of(width) for width in (1, 2, 4, 6)] == [2.0, 2.0, 4.0, 6.0]
    assert costs.of(8) == pytest.approx(6.0 * (1 + 2 * HOPE))
    costs.note(1, 6, 1e9)
    assert costs.of(6) < 6.5, "a step that was held up"
    for _ in range(60):
        costs.note(1, 6, 1.0)
    assert costs.of(6) == pytest.approx(1.0)
    assert costs.rising(2, 5)[4] == 2.0, "a wider step takes no less"
    assert len(costs.rising(WIDEST - 1, 9)) == 2
    assert costs.of(WIDEST + 9) > costs.of(WIDEST)
    costs.note(1, WIDEST + 1, 1.0)
    assert not costs.is_known(WIDEST + 1)


def test_a_prior_is_taken_until_steps_of_requests_are_seen() -> None:
    """Then its shape alone counts: what takes twice as long as it was timed to makes its neighbors do so, too."""
    costs = StepCosts()
    costs.expect({1: 1.0, 9: 2.0, WIDEST + 1: 1.0})
    assert [width for width in range(20) if costs.is_known(width)] == [1, 9]
    assert [costs.of(width) for width in (1, 5, 9)] == pytest.approx([1.0, 1.5, 2.0])
    assert costs.of(19) == pytest.approx(2.0 * (1 + 10 * HOPE))
    for _ in range(2):  # the first one may have been recorded
        costs.note(1, 1, 2.0)
    assert [costs.of(width) for width in (1, 5, 9)] == pytest.approx([2.0, 3.0, 4.0])
    for _ in range(2):
        costs.note(1, 9, 2.0)
    assert [costs.of(width) for width in (1, 5, 9)] == pytest.approx([2.0, 1.5 * 1.5, 2.0])
    assert not costs.is_known(WIDEST + 1)


@given(
    st.dictionaries(st.integers(1, 40), st.floats(0.1, 9), max_size=5),
    st.dictionaries(st.integers(1, 40), st.floats(0.1, 9), max_size=5),
    st.integers(1, 45),
)
@settings(derandomize=True, deadline=None)
def test_estimates_of_a_row_of_widths_are_those_of_each(
    timed: dict[int, float], seen: dict[int, float], first: int
) -> None:
    """As numpy interpolates: what was seen over what was expected, times that."""
    costs = StepCosts()
    costs.expect(timed)
    for width, seconds in seen.items():
        for _ in range(2):
            costs.note(1, width, seconds)

    def expected(width: int) -> float:
        if not timed:
            return 1.0
        beyond = 1 + HOPE * max(width - max(timed), 0)
        return float(np.interp(width, sorted(timed), [timed[one] for one in sorted(timed)])) * beyond

    def estimate(width: int) -> float:
        known = sorted(seen)
        ratio = np.interp(width, known, [seen[one] / expected(one) for one in known]) if seen else 1.0
        hope = 1.0 if timed else 1 + HOPE * max(width - max(seen, default=0), 0)
        return float(ratio) * expected(width) * hope

    estimates = [estimate(width) for width in range(first, first + 12)]
    assert [costs.of(width) for width in range(first, first + 12)] == pytest.approx(estimates)
    assert costs.rising(first, 12) == pytest.approx(list(itertools.accumulate(estimates, max)))


def test_first_step_with_a_prior_may_have_drafts() -> None:
    speculation = Speculation({"said": Said({"a": Draft([1] * 8)})})
    assert speculation.costs is not None
    speculation.costs.expect({width: 1.0 + 0.01 * width for width in (1, 2, 3, 5, 9)})
    speculation.add_request("a", 1, ("", None))
    assert len(proposed(speculation)) > 1
    assert Speculation({}, adaptive=False).costs is None


def test_acceptance_follows_the_request_and_fades_to_its_kind() -> None:
    acceptance = Acceptance()
    assert acceptance.rate("a", "kind") == 0.5
    for _ in range(30):
        acceptance.note("a", "kind", 4, 4)
        acceptance.note("b", "other", 4, 0)
    assert acceptance.rate("a", "kind") > 0.95
    assert acceptance.rate("b", "other") < 0.1
    assert acceptance.rate("c", "kind") > 0.9
    for _ in range(500):
        acceptance.note_idle("b")
    assert acceptance.rate("b", "kind") == pytest.approx(acceptance.rate("c", "kind"), abs=0.01)


def test_rejected_drafting_pauses_longer_and_longer() -> None:
    balance, rests = DraftingBalance(), list[int]()
    for _ in range(9):
        for _ in range(TRIAL_STEPS):
            assert not balance.rests()
            balance.note(0.0, 1.0)
        balance.note_time(TRIAL_STEPS / SHARE)
        rests.append(sum(balance.rests() for _ in range(2 * LONGEST_REST)))
    assert rests == [min(SHORTEST_REST * 2**i, LONGEST_REST) for i in range(9)]
    balance.note(5.0, 1.0)
    for _ in range(TRIAL_STEPS):
        balance.note(0.0, 9.0)
    balance.note_time(9 * TRIAL_STEPS / SHARE)
    balance.wake()
    assert 0 < sum(balance.rests() for _ in range(LONGEST_REST)) <= SHORTEST_REST


@given(st.integers(0, 2**32), st.floats(0.01, 10.0))
def test_rejected_trials_take_a_small_share_for_any_wakeups(seed: int, spent_s: float) -> None:
    """Steps last one second each; a trial's time is part of the total at once."""
    random, balance, seconds, lost = Random(seed), DraftingBalance(), 0.0, 0.0
    for _ in range(2000):
        if random.random() < 0.05:
            balance.wake()
        if not balance.rests():
            balance.note(0.0, spent_s)
            lost += spent_s
        balance.note_time(1.0)
        seconds += 1.0
    assert 0 < lost <= SHARE * seconds + TRIAL_STEPS * spent_s


class Said:
    """A drafter that says what it is told to."""

    keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, drafts: dict[str, Draft]) -> None:
        self.drafts = drafts
        self.forgotten: list[str] = []

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        return [self.drafts.get(text.request_id, Draft([])) for text in texts]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def tokens(*names: str) -> dict[str, np.ndarray]:
    return {name: np.zeros(4, dtype=np.int32) for name in names}


def test_certain_drafts_go_first_and_grammars_cut_the_others() -> None:
    first = Said({"a": Draft([1], 3), "b": Draft([2, 2, 2], 1)})
    second = Said({"a": Draft([3, 3], CERTAIN), "b": Draft([4], 9), "c": Draft([5])})
    both = Speculation(
        {"first": first, "second": second},
        adaptive=False,
        allowed=lambda name, known, drafts: {"a": 2, "b": 2, "c": 0}[name],
    )
    for name in "abc":
        both.add_request(name, 1, ("", None))
    assert both.propose(tokens("a", "b", "c", "gone")) == {"a": [3, 3], "b": [2, 2]}
    both.remove_request("b")
    assert both.propose(tokens("a", "b")) == {"a": [3, 3]}
    assert first.forgotten == second.forgotten == ["b"]


def proposed(speculation: Speculation) -> list[int]:
    """Guesses for the next step of the one request, if any are asked for."""
    return [] if speculation.rests() else speculation.propose(tokens("a")).get("a", [])


def run(speculation: Speculation, num_right: int, num_steps: int) -> list[int]:
    """Steps of one request in which so many of the guesses are right; how many are verified in each."""
    speculation.add_request("a", 1, ("", None))
    verified = []
    for _ in range(num_steps):
        count = len(proposed(speculation))
        verified.append(count)
        step = {"a": Verified(count, min(count, num_right))} if count else {}
        speculation.note_step(step, 1, 1 + count, 1.0 + 0.05 * count)
    return verified


def test_request_with_rejected_drafts_gets_hardly_any() -> None:
    drafts = {"a": Draft([1] * 8)}
    right = run(Speculation({"said": Said(drafts)}), 8, 100)
    assert right[-50:] == [8] * 50
    wrong = run(Speculation({"said": Said(drafts)}), 0, 300)
    assert sum(wrong[20:]) < 40


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_drafter_that_costs_more_than_it_saves_is_used_less(num_ahead: int) -> None:
    """Steps that were planned while guessing rested say nothing about it."""
    clocks, asked, done = ManualClocks(), list[int](), list[int]()

    class Slow(Said):
        def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
            asked.append(len(done))
            clocks.seconds += 0.005  # too little for the share to count
            return super().propose(texts, most)

    slow = Slow({"a": Draft([1] * 4)})
    speculation = Speculation({"slow": slow}, num_ahead=num_ahead, clocks=clocks)
    speculation.add_request("a", 1, ("", None))
    planned = [0] * (1 + num_ahead)
    while len(done) < 4000:
        count = planned.pop(0)
        done.append(count)
        verified = {"a": Verified(count, 0)} if count else {}
        speculation.note_step(verified, 1, 1 + count, 1.0 + 0.0005 * count)
        planned.append(len(proposed(speculation)))
    rests = [later - step - 1 for step, later in itertools.pairwise(asked) if later > step + 1]
    assert rests[:6] == [SHORTEST_REST * 2**i for i in range(5)] + [LONGEST_REST]
    assert set(rests[6:]) == {LONGEST_REST}
