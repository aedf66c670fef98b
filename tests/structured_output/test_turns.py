# SPDX-License-Identifier: Apache-2.0
"""Turns are bounded, and fair by what tenants were charged."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import UnavailableError
from quire.structured_output.turns import (
    MAX_TENANTS,
    MAX_WAITING,
    MAX_WAITING_OF_TENANT,
    FairTurns,
    Turn,
)


def end(turn: Turn, cost_s: float = 0.0) -> None:
    turn.cost_s = cost_s
    turn.end()


def test_named_tenant_occupies_half_of_the_places() -> None:
    queue = FairTurns(4)
    first = [queue.take("a") for _ in range(6)]
    assert [turn.granted.done() for turn in first] == [True, True, False, False, False, False]
    others = [queue.take(name) for name in "bcd"]
    assert [turn.granted.done() for turn in others] == [True, True, False]
    end(first[0])
    assert others[2].granted.done()
    assert not first[2].granted.done()


def test_only_place_serves_one_tenant_after_another() -> None:
    queue = FairTurns(1)
    slow, waits, other = queue.take("a"), queue.take("a"), queue.take("b")
    end(slow, 10.0)
    assert other.granted.done()
    end(other)
    assert waits.granted.done()


def test_unnamed_tenant_alone_occupies_every_place() -> None:
    queue = FairTurns(2)
    unnamed = [queue.take("") for _ in range(4)]
    assert [turn.granted.done() for turn in unnamed] == [True, True, False, False]
    named = queue.take("a")
    end(unnamed[0], 1.0)
    assert named.granted.done()
    end(named)
    assert not unnamed[2].granted.done(), "half of the places, now that there are others"


def test_tenant_charged_least_is_next() -> None:
    queue = FairTurns(1)
    holder = queue.take("x")
    costs, order = {"slow": 10.0, "fast": 1.0}, Counter[str]()
    waiting = {name: [queue.take(name) for _ in range(40)] for name in costs}
    end(holder)
    for _ in range(33):
        name = next(name for name, turns in waiting.items() if turns[0].granted.done())
        order[name] += 1
        end(waiting[name].pop(0), costs[name])
    assert order == {"slow": 3, "fast": 30}


def test_tenant_that_comes_back_has_saved_nothing() -> None:
    queue = FairTurns(1)
    end(queue.take("idle"))
    holder, busy = queue.take("busy"), [queue.take("busy") for _ in range(5)]
    end(holder, 100.0)
    back = [queue.take("idle") for _ in range(3)]
    end(busy[0], 1.0)
    assert back[0].granted.done()
    end(back[0], 2.0)
    assert busy[1].granted.done()


def test_queue_is_bounded_by_tenant_and_in_sum() -> None:
    queue = FairTurns(1)
    queue.take("a")
    for _ in range(MAX_WAITING_OF_TENANT):
        queue.take("a")
    with pytest.raises(UnavailableError, match="64 constraints of this tenant wait"):
        queue.take("a")
    for number in range(MAX_WAITING - MAX_WAITING_OF_TENANT):
        queue.take(f"t{number}")
    with pytest.raises(UnavailableError, match="256 constraints wait"):
        queue.take("b")


def test_accounts_are_bounded() -> None:
    queue = FairTurns(2)
    for number in range(2 * MAX_TENANTS):
        end(queue.take(f"t{number}"))
    assert len(queue._tenants) <= MAX_TENANTS


@settings(derandomize=True, max_examples=60, deadline=None)
@given(num_places=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_places_are_neither_lost_nor_lent_twice(num_places: int, seed: int) -> None:
    """Whatever order turns are taken, started, cancelled and ended in."""
    rng, queue = random.Random(seed), FairTurns(num_places)
    turns: list[Turn] = []
    for _ in range(200):
        if not turns or rng.random() < 0.5:
            turns.append(queue.take(rng.choice(["", "a", "b", "c"])))
        else:
            turn = turns.pop(rng.randrange(len(turns)))
            if rng.random() < 0.3:
                turn.granted.cancel()
            end(turn, rng.random())
            turn.end()
        granted = Counter(turn.tenant for turn in turns if turn.granted.done())
        assert granted.total() <= num_places
        most = max(1, num_places // 2)
        assert all(granted[name] <= most for name in "abc")
        if any(not turn.granted.done() for turn in turns):
            assert granted.total() >= 1
    for turn in turns:
        turn.end()
    assert queue._num_free == num_places
    assert queue._num_waiting == 0
