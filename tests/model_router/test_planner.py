# SPDX-License-Identifier: Apache-2.0
"""Decisions of the router: single rules, and random histories against a plain model of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import NotFoundError, RateLimitError, UnavailableError
from quire.model_router.planner import (
    Admit,
    LoadModel,
    Measure,
    ModelPhase,
    ModelRules,
    PlannerLimits,
    Refuse,
    RouterPlanner,
    Size,
    Suspend,
    Unload,
    Wake,
)

PLENTY = 1 << 60
RULES = ModelRules()
STILL = ModelRules(sleeps=False)


def make(limit: int = 10, rules: dict[str, ModelRules] | None = None, **limits: Any) -> RouterPlanner:
    """A planner of models a, b and c, each of 4 bytes, of which 1 stays while it sleeps."""
    planner = RouterPlanner(rules or dict.fromkeys("abc", STILL), PlannerLimits(limit, **limits))
    for name in planner.models:
        planner.sized(name, Size(4, 1))
    return planner


def load(planner: RouterPlanner, model: str, now: float, request: int | None = None) -> None:
    """Load a model that fits, for a request that goes on or, without one, for nobody."""
    if request is None:
        planner.want(model, now)
    else:
        planner.request(request, model, now)
    assert LoadModel(model) in planner.plan(now, PLENTY)
    planner.ready(model, now)
    planner.plan(now, PLENTY)


def test_request_for_an_unloaded_model_loads_and_admits() -> None:
    planner = make()
    planner.request(1, "a", 0.0)
    assert planner.plan(0.0, PLENTY) == [LoadModel("a")]
    assert planner.plan(1.0, PLENTY) == []
    planner.ready("a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Admit(1, "a")]


def test_unmeasured_model_is_measured_once_before_it_loads() -> None:
    planner = RouterPlanner({"a": RULES}, PlannerLimits(10))
    planner.request(1, "a", 0.0)
    assert planner.plan(0.0, PLENTY) == [Measure("a")]
    assert planner.plan(0.0, PLENTY) == []
    planner.sized("a", Size(4, 1))
    assert planner.plan(0.0, PLENTY) == [LoadModel("a")]


def test_least_recently_used_idle_model_is_evicted() -> None:
    planner = make()
    load(planner, "a", 0.0)
    load(planner, "b", 1.0)
    planner.request(1, "a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Admit(1, "a")]
    planner.leave(1, "a", 3.0)
    planner.request(2, "c", 4.0)
    assert planner.plan(4.0, PLENTY) == [Unload("b")]
    assert planner.plan(5.0, PLENTY) == []
    planner.ended("b", 6.0)
    assert planner.plan(6.0, PLENTY) == [LoadModel("c")]


def test_model_that_may_sleep_sleeps_if_that_is_enough() -> None:
    planner = make(rules=dict.fromkeys("abc", RULES))
    load(planner, "a", 0.0)
    load(planner, "b", 1.0)
    planner.request(1, "c", 2.0)
    assert planner.plan(2.0, PLENTY) == [Suspend("a")]
    planner.asleep("a", 3.0)
    assert planner.plan(3.0, PLENTY) == [LoadModel("c")]


def test_sleeping_model_wakes_for_a_request() -> None:
    planner = make(rules=dict.fromkeys("abc", RULES))
    load(planner, "a", 0.0)
    load(planner, "b", 1.0)
    load_after_sleep(planner)
    planner.request(2, "a", 9.0)
    assert planner.plan(9.0, PLENTY) == [Suspend("b")]
    planner.asleep("b", 9.0)
    assert planner.plan(9.0, PLENTY) == [Wake("a")]
    planner.ready("a", 9.5)
    assert planner.plan(9.5, PLENTY) == [Admit(2, "a")]


def load_after_sleep(planner: RouterPlanner) -> None:
    """Bring in c, for which a goes to sleep."""
    planner.request(1, "c", 2.0)
    planner.plan(2.0, PLENTY)
    planner.asleep("a", 2.0)
    planner.plan(2.0, PLENTY)
    planner.ready("c", 2.0)
    planner.plan(2.0, PLENTY)
    planner.leave(1, "c", 3.0)


def test_model_in_use_is_closed_after_its_turn_not_cut() -> None:
    planner = make(limit=4, turn_s=10.0)
    load(planner, "a", 0.0, request=1)
    planner.request(2, "b", 5.0)
    assert planner.plan(14.0, PLENTY) == []
    planner.request(3, "a", 14.0)
    assert planner.plan(14.0, PLENTY) == [Admit(3, "a")]
    assert planner.plan(15.0, PLENTY) == []
    planner.request(4, "a", 15.0)
    assert planner.plan(15.0, PLENTY) == []
    planner.leave(1, "a", 16.0)
    assert planner.plan(16.0, PLENTY) == []
    planner.leave(3, "a", 17.0)
    assert planner.plan(17.0, PLENTY) == [Unload("a")]
    planner.ended("a", 18.0)
    assert planner.plan(18.0, PLENTY) == [LoadModel("b")]


def test_closed_model_opens_when_the_other_client_leaves() -> None:
    planner = make(limit=4, turn_s=0.0)
    load(planner, "a", 0.0, request=1)
    planner.request(2, "b", 1.0)
    planner.request(3, "a", 1.0)
    assert planner.plan(1.0, PLENTY) == []
    planner.leave(2, "b", 2.0)
    assert planner.plan(2.0, PLENTY) == [Admit(3, "a")]


def test_pinned_model_never_makes_room() -> None:
    planner = make(limit=4, rules={"a": ModelRules(pinned=True), "b": RULES})
    load(planner, "a", 0.0)
    planner.request(1, "b", 1.0)
    (refused,) = planner.plan(1.0, PLENTY)
    assert isinstance(refused, Refuse)
    assert "needs 0 MiB, and of 0 MiB for models" in str(refused.error)


def test_request_is_refused_at_its_deadline_in_words() -> None:
    planner = make(limit=4, wait_timeout_s=30.0, turn_s=100.0)
    load(planner, "a", 0.0, request=1)
    planner.request(2, "b", 0.0)
    assert planner.plan(29.9, PLENTY) == []
    (refused,) = planner.plan(30.0, PLENTY)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, UnavailableError)
    assert "'b' is unloaded and was not available within 30 s" in str(refused.error)
    assert refused.error.retry_after >= 1


def test_memory_that_others_hold_delays_a_load() -> None:
    planner = make()
    planner.request(1, "a", 0.0)
    assert planner.plan(0.0, 3) == []
    assert planner.plan(1.0, 4) == [LoadModel("a")]


def test_load_in_progress_counts_as_memory_taken() -> None:
    planner = make(limit=100)
    planner.request(1, "a", 0.0)
    planner.request(2, "b", 0.0)
    assert planner.plan(0.0, 7) == [LoadModel("a")]
    assert planner.plan(0.0, 7) == []
    planner.ready("a", 1.0)
    assert planner.plan(1.0, 4) == [LoadModel("b"), Admit(1, "a")]


def test_idle_model_is_unloaded_after_its_keep_alive() -> None:
    planner = make(rules={"a": ModelRules(keep_alive_s=5.0)})
    load(planner, "a", 0.0)
    assert planner.next_event(0.0) == 5.0
    assert planner.plan(5.0, PLENTY) == [Unload("a")]


def test_keep_alive_of_a_request_holds_from_its_end() -> None:
    planner = make()
    load(planner, "a", 0.0, request=1)
    planner.leave(1, "a", 3.0, keep_alive_s=0.0)
    assert planner.plan(3.0, PLENTY) == [Unload("a")]


def test_released_model_ends_when_its_requests_have() -> None:
    planner = make()
    load(planner, "a", 0.0, request=1)
    planner.release("a")
    assert planner.plan(1.0, PLENTY) == []
    planner.leave(1, "a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Unload("a")]


def test_failed_load_says_why_and_is_tried_again_later() -> None:
    planner = make()
    planner.request(1, "a", 0.0)
    planner.plan(0.0, PLENTY)
    planner.failed("a", "no such file", 1.0)
    (refused,) = planner.plan(1.0, PLENTY)
    assert isinstance(refused, Refuse)
    assert str(refused.error) == "the model 'a' failed: no such file; it is tried again in 2 s"
    planner.request(2, "a", 3.0)
    assert planner.plan(3.0, PLENTY) == [LoadModel("a")]


def test_first_death_of_a_model_delays_nobody() -> None:
    planner = make()
    load(planner, "a", 0.0, request=1)
    planner.failed("a", "killed by signal 9", 1.0)
    planner.leave(1, "a", 1.0)
    planner.request(2, "a", 1.0)
    assert planner.plan(1.0, PLENTY) == [LoadModel("a")]
    planner.ready("a", 2.0)
    planner.plan(2.0, PLENTY)
    planner.failed("a", "killed by signal 9", 3.0)
    planner.request(3, "a", 3.0)
    (refused,) = planner.plan(3.0, PLENTY)
    assert "failed 2 times: killed by signal 9" in str(refused.error)  # type: ignore[union-attr]


def test_deaths_at_load_are_tried_at_ever_longer_intervals() -> None:
    """The waits double up to two minutes; other models do not notice, and a good load ends it."""
    planner, now, waits = make(limit=100), 0.0, []
    load(planner, "b", now, request=100)
    for number in range(9):
        planner.request(number, "a", now)
        assert planner.plan(now, PLENTY) == [LoadModel("a")]
        planner.failed("a", "killed by signal 9", now)
        (refused,) = planner.plan(now, PLENTY)
        assert isinstance(refused, Refuse)
        assert "killed by signal 9" in str(refused.error)
        waits.append(planner.models["a"].retry_at - now)
        assert refused.error.retry_after == waits[-1]
        planner.request(1000 + number, "b", now)
        planner.request(2000 + number, "a", now)
        early = planner.plan(now + waits[-1] / 2, PLENTY)
        assert [(type(one), one.model) for one in early] == [(Refuse, "a"), (Admit, "b")]
        now += waits[-1]
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0, 120.0]
    load(planner, "a", now)
    planner.failed("a", "killed by signal 9", now + 61.0)
    assert planner.models["a"].status is ModelPhase.UNLOADED, "a minute of service forgets the failures"


def test_changed_model_ends_its_requests_then_loads_anew() -> None:
    planner = make()
    load(planner, "a", 0.0, request=1)
    planner.change({"a": STILL, "b": STILL, "new": STILL}, {"a", "new"})
    assert list(planner.models) == ["a", "b", "c", "new"]
    planner.purge()
    assert list(planner.models) == ["a", "b", "new"], "nothing is left of c"
    planner.request(2, "a", 1.0)
    assert planner.plan(1.0, PLENTY) == [], "the new request waits, the old one runs"
    planner.leave(1, "a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Unload("a")]
    assert planner.charged_bytes == 4
    planner.ended("a", 3.0)
    assert planner.plan(3.0, PLENTY) == [Measure("a")]
    planner.sized("a", Size(5, 1))
    assert planner.plan(3.0, PLENTY) == [LoadModel("a")]
    planner.ready("a", 4.0)
    assert planner.plan(4.0, PLENTY) == [Admit(2, "a")]


def test_removed_model_ends_its_requests_then_is_forgotten() -> None:
    planner = make()
    load(planner, "a", 0.0, request=1)
    planner.request(2, "b", 0.0)
    planner.change({"c": STILL}, set())
    (refused,) = [one for one in planner.plan(1.0, PLENTY) if isinstance(one, Refuse)]
    assert (refused.request, type(refused.error)) == (2, NotFoundError)
    with pytest.raises(NotFoundError, match="'a' was removed"):
        planner.request(3, "a", 1.0)
    planner.leave(2, "b", 1.0)
    planner.purge()
    assert list(planner.models) == ["a", "c"]
    planner.leave(1, "a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Unload("a")]
    planner.ended("a", 3.0)
    planner.purge()
    assert list(planner.models) == ["c"]
    planner.leave(1, "a", 4.0)  # which may come late


def test_pinned_model_that_changes_while_it_loads_loads_again() -> None:
    pinned = ModelRules(pinned=True)
    planner = make(rules={"a": pinned})
    planner.want("a", 0.0)
    assert planner.plan(0.0, PLENTY) == [LoadModel("a")]
    planner.change({"a": pinned}, {"a"})
    planner.want("a", 1.0)
    planner.ready("a", 2.0)
    assert planner.plan(2.0, PLENTY) == [Unload("a")]
    planner.ended("a", 3.0)
    assert planner.plan(3.0, PLENTY) == [Measure("a")]


def test_failed_model_that_changes_is_tried_at_once() -> None:
    planner = make()
    planner.request(1, "a", 0.0)
    planner.plan(0.0, PLENTY)
    planner.failed("a", "no such file", 1.0)
    planner.plan(1.0, PLENTY)
    planner.change(dict.fromkeys("abc", STILL), {"a"})
    planner.sized("a", Size(4, 1))
    planner.request(2, "a", 1.0)
    assert planner.plan(1.0, PLENTY) == [LoadModel("a")]


def test_keep_alive_of_zero_unloads_after_each_request() -> None:
    planner = make(rules={"a": ModelRules(keep_alive_s=0.0)})
    load(planner, "a", 0.0, request=1)
    planner.request(2, "a", 1.0)
    assert planner.plan(1.0, PLENTY) == [Admit(2, "a")]
    planner.leave(1, "a", 2.0)
    assert planner.plan(2.0, PLENTY) == []
    planner.leave(2, "a", 3.0)
    planner.request(3, "a", 3.0)
    assert planner.plan(3.0, PLENTY) == [Admit(3, "a")], "a request that waits is served first"
    planner.leave(3, "a", 4.0)
    assert planner.plan(4.0, PLENTY) == [Unload("a")]


def test_limits_of_requests_are_refused_at_once() -> None:
    planner = make(rules={"a": ModelRules(max_requests=1), "b": RULES}, max_waiting=2)
    planner.request(1, "a", 0.0)
    with pytest.raises(RateLimitError, match="1 requests for the model 'a'"):
        planner.request(2, "a", 0.0)
    planner.request(3, "b", 0.0)
    with pytest.raises(UnavailableError, match="2 requests wait for models"):
        planner.request(4, "b", 0.0)


def test_request_without_autoload_is_refused_unless_loaded() -> None:
    planner = make()
    with pytest.raises(UnavailableError, match="POST /models/load"):
        planner.request(1, "a", 0.0, autoload=False)
    load(planner, "a", 0.0)
    planner.request(1, "a", 0.0, autoload=False)
    assert planner.plan(0.0, PLENTY) == [Admit(1, "a")]


def test_most_loaded_models_is_a_limit_of_its_own() -> None:
    planner = make(limit=100, max_loaded=1)
    load(planner, "a", 0.0)
    planner.request(1, "b", 1.0)
    assert planner.plan(1.0, PLENTY) == [Unload("a")]


def test_draining_refuses_what_waits_and_loads_nothing() -> None:
    planner = make()
    planner.request(1, "a", 0.0)
    planner.drain()
    (refused,) = planner.plan(0.0, PLENTY)
    assert isinstance(refused, Refuse)
    with pytest.raises(UnavailableError, match="shutting down"):
        planner.request(2, "a", 0.0)


def test_eviction_spares_models_whose_end_is_not_needed() -> None:
    planner = RouterPlanner(dict.fromkeys("abcd", STILL), PlannerLimits(10))
    for name, size in {"a": 1, "b": 8, "c": 1, "d": 8}.items():
        planner.sized(name, Size(size, 0))
    for now, name in enumerate("abc"):
        load(planner, name, float(now))
    planner.request(1, "d", 9.0)
    assert planner.plan(9.0, PLENTY) == [Unload("b")]


@dataclass
class World:
    """Plain model of the machine: carries out actions, some time later, and checks each of them.

    Attributes:
        sizes: model -> what a measurement finds.
        changing: model -> action that is being carried out.
        open: request -> model, of those that were neither refused nor have ended.
    """

    planner: RouterPlanner
    limit: int
    sizes: dict[str, Size] = field(default_factory=dict)
    now: float = 0.0
    changing: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    open: dict[int, str] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    arrivals: dict[int, float] = field(default_factory=dict)

    def step(self) -> None:
        for action in self.planner.plan(self.now, PLENTY):
            self.carry_out(action)
        assert sum(self.memory.values()) <= self.limit
        assert self.planner.charged_bytes == sum(self.memory.values())
        for request in self.open.keys() - self.running:
            assert self.now - self.arrivals[request] < self.planner.limits.wait_timeout_s

    def carry_out(self, action: Any) -> None:
        if isinstance(action, Admit):
            assert action.request not in self.running
            assert self.planner.models[action.model].status is ModelPhase.LOADED
            self.running.add(action.request)
        elif isinstance(action, Refuse):
            assert action.request not in self.running
            del self.open[action.request]
        elif isinstance(action, Measure):
            self.planner.sized(action.model, self.sizes[action.model])
        else:
            self.begin(action)

    def begin(self, action: Any) -> None:
        model, state = action.model, self.planner.models[action.model]
        assert model not in self.changing
        size = state.size
        assert size is not None
        if isinstance(action, Unload | Suspend):
            assert not state.rules.pinned or state.is_stale
            assert not [one for one in self.running if self.open[one] == model]
        else:
            self.memory[model] = size.needed_bytes
        self.changing[model] = action

    def finish(self, model: str) -> None:
        action, size = self.changing.pop(model), self.planner.models[model].size
        assert size is not None
        if isinstance(action, Unload):
            del self.memory[model]
            self.planner.ended(model, self.now)
        elif isinstance(action, Suspend):
            self.memory[model] = size.asleep_bytes
            self.planner.asleep(model, self.now)
        else:
            self.planner.ready(model, self.now)

    def die(self, model: str) -> None:
        """End a model's processes, whatever it does; what ran there ends, too."""
        self.memory.pop(model, None)
        if isinstance(self.changing.pop(model, None), Unload):
            self.planner.ended(model, self.now)
        else:
            self.planner.failed(model, "killed", self.now)
        for request in [one for one in self.running if self.open[one] == model]:
            self.end(request)

    def end(self, request: int) -> None:
        self.planner.leave(request, self.open.pop(request), self.now)
        self.running.discard(request)


NAMES = "abcd"
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "end", "end", "leave", "finish", "finish", "die", "load", "free", "change"]
        ),
        st.integers(0, 3),
        st.floats(0.0, 4.0),
    ),
    max_size=60,
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rules = {
        name: ModelRules(
            pinned=draw(st.booleans()) and name == "a",
            keep_alive_s=draw(st.sampled_from([math.inf, 3.0])),
            sleeps=draw(st.booleans()),
            max_requests=draw(st.sampled_from([None, 2])),
        )
        for name in NAMES
    }
    limit = draw(st.integers(4, 12))
    limits = PlannerLimits(
        limit, draw(st.integers(0, 3)), wait_timeout_s=20.0, turn_s=draw(st.floats(0.0, 5.0))
    )
    planner, sizes = RouterPlanner(rules, limits), {}
    for name in NAMES:
        needed = draw(st.integers(1, 6))
        sizes[name] = Size(needed, draw(st.integers(0, needed)))
        planner.sized(name, sizes[name])
    return World(planner, limit, sizes)


@settings(max_examples=100)
@given(worlds(), EVENTS)
def test_random_histories_keep_every_promise(world: World, events: list[tuple[str, int, float]]) -> None:
    """Nothing in use or pinned is evicted, memory stays below its limit, and every request has an end."""
    numbers = iter(range(10_000))
    for kind, which, seconds in events:
        happen(world, kind, NAMES[which], numbers)
        world.step()
        world.now += seconds
        world.step()
    settle(world)
    assert world.open == {}


def happen(world: World, kind: str, model: str, numbers: Iterator[int]) -> None:
    mine = [request for request, name in world.open.items() if name == model]
    if kind == "ask":
        request = next(numbers)
        try:
            world.planner.request(request, model, world.now)
        except UnavailableError:
            return
        world.open[request], world.arrivals[request] = model, world.now
    elif kind == "load":
        world.planner.want(model, world.now)
    elif kind == "change":
        planner = world.planner
        planner.change({name: state.rules for name, state in planner.models.items()}, {model})
    elif kind == "free" and not world.planner.models[model].rules.pinned:
        world.planner.release(model)
    elif kind == "finish" and model in world.changing:
        world.finish(model)
    elif kind == "die" and model in world.memory:
        world.die(model)
    elif kind in ("end", "leave"):
        for request in [one for one in mine if (one in world.running) == (kind == "end")][:1]:
            world.end(request)


def settle(world: World) -> None:
    """End everything that is going on, again and again; who waits is served, or refused at its deadline."""
    for _ in range(60):
        for model in list(world.changing):
            world.finish(model)
        for request in list(world.running):
            world.end(request)
        world.step()
        world.now += 0.5
        world.step()


@settings(max_examples=12)
@given(st.integers(2, 4), st.floats(0.0, 5.0))
def test_busy_models_take_turns(num_models: int, turn_s: float) -> None:
    """Models that are all wanted all the time, with room for one: each is served, within a turn of the others."""
    names = NAMES[:num_models]
    planner = RouterPlanner(
        dict.fromkeys(names, STILL), PlannerLimits(4, turn_s=turn_s, wait_timeout_s=1000.0)
    )
    world = World(planner, 4)
    numbers = iter(range(100_000))
    for name in names:
        planner.sized(name, Size(4, 0))
    for _ in range(40 * num_models):
        for name in names:
            if sum(model == name for model in world.open.values()) < 2:
                happen(world, "ask", name, numbers)
        world.step()
        for model in list(world.changing):
            world.finish(model)
        world.step()
        world.now += 0.5
        for request in list(world.running):
            world.end(request)
    waits = [world.now - world.arrivals[one] for one in world.open.keys() - world.running]
    assert max(waits, default=0.0) <= num_models * (turn_s + 3 * 0.5) + 0.5
