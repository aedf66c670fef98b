# SPDX-License-Identifier: Apache-2.0
"""No livelock, no starvation: every request ends within the bound that its policy's docstring states.

A step is a second here. The first request in the order of service advances by at least a token in every step, so
a request has ended after at most as many steps as it and those served before it have tokens in all.
"""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler.request import Request
from tests.scheduler.harness import Engine, make_config, run_alone

AGEING_S = 5.0
LONG = {"prompt": list(range(39)), "max_tokens": 20}


def engine_of(policy: str, **changes) -> Engine:
    """A pool of 16 blocks, of which the long request needs 15."""
    return Engine(
        make_config(
            **{
                "scheduling_policy": policy,
                "priority_ageing_s": AGEING_S,
                "num_gpu_blocks_override": 17,
                **changes,
            }
        )
    )


class Traffic:
    """Two short requests before every step, for ever, with a cycle of fields."""

    def __init__(self, engine: Engine, *cycle: dict) -> None:
        self.engine = engine
        self._fields: Iterator[dict] = itertools.cycle(cycle or ({},))
        self._numbers = itertools.count()

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for _ in range(2):
                number, fields = next(self._numbers), next(self._fields)
                prompt = [number % 40, number // 40 % 40, 7]
                self.engine.add(f"s{number}", prompt, **{"max_tokens": 1 + number % 5, **fields})
            self.engine.step()

    def steps_until_end_of(self, request: Request, bound: int) -> int:
        for num_steps in range(1, bound + 1):
            self.step()
            if request.is_finished:
                return num_steps
        raise AssertionError(f"{request!r} has not ended after {bound} steps")


def num_tokens(requests) -> int:
    return sum(request.num_prompt_tokens + request.sampling_params.max_tokens for request in requests)


def unfinished(engine: Engine) -> list[Request]:
    return [request for request in engine.requests.values() if not request.is_finished]


def overtakers(engine: Engine, request: Request) -> list[Request]:
    """By the bound of `Priority`: the more urgent ones that come soon enough after it."""
    return [
        other
        for other in engine.requests.values()
        if 0 <= other.queued_ts - request.queued_ts < AGEING_S * (request.priority - other.priority)
    ]


def test_fcfs_endless_short_traffic_starves_no_long_request():
    engine = engine_of("fcfs")
    traffic = Traffic(engine)
    traffic.step(20)
    before = unfinished(engine)
    long = engine.add("long", **LONG)
    traffic.steps_until_end_of(long, bound=num_tokens([*before, long]))
    assert engine.tokens("long") == run_alone(long, engine.config).new_token_ids


@pytest.mark.item(31)
@pytest.mark.parametrize("priority", [1, 3, 8])
def test_priority_an_unimportant_request_waits_for_its_age(priority):
    engine = engine_of("priority")
    traffic = Traffic(engine)
    traffic.step(20)
    before = unfinished(engine)
    long = engine.add("long", **LONG, priority=priority)
    num_later = int(2 * AGEING_S * priority)
    bound = num_tokens([*before, long]) + num_later * (3 + 5)
    num_steps = traffic.steps_until_end_of(long, bound)
    assert num_steps <= num_tokens([*before, *overtakers(engine, long), long])
    assert engine.last("long").num_preemptions <= len(overtakers(engine, long))


def test_priority_without_ageing_starves_as_documented():
    engine = engine_of("priority", priority_ageing_s=0.0)
    traffic = Traffic(engine)
    long = engine.add("long", **LONG, priority=1)
    traffic.step(300)
    assert not long.is_finished


@pytest.mark.item(30)
def test_fair_a_flood_cannot_hold_up_another_tenant():
    """At most one request of the flood starts between the arrival of another tenant's and its start."""
    engine = engine_of("fair")
    traffic = Traffic(engine, {"tenant": "flood"})
    traffic.step(20)
    for number in range(5):
        running = [request for request in unfinished(engine) if request.scheduled_ts]
        first_plan = len(engine.plans)
        long = engine.add(f"long{number}", **LONG, tenant="other")
        bound = num_tokens([*running, long]) + 3 + 5
        traffic.steps_until_end_of(long, bound)
        started = [data.request_id for plan in engine.plans[first_plan:] for data in plan.new_requests]
        new = [name for name in started if name.startswith("s") and engine.requests[name] not in running]
        ahead = started[: started.index(f"long{number}")]
        assert sum(name in new for name in ahead) <= 1


def steps_to_first_token(engine: Engine, name: str, prompt: list[int], tenant: str) -> int:
    engine.add(name, prompt, max_tokens=3, tenant=tenant)
    for num_steps in itertools.count(1):
        engine.step()
        if engine.tokens(name):
            return num_steps
    raise AssertionError


@pytest.mark.item(30)
@pytest.mark.parametrize("max_num_seqs", [2, 4, 8])
@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    flood=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 24)), min_size=1, max_size=12),
    num_steps=st.integers(1, 80),
    length=st.integers(1, 24),
    num_blocks=st.integers(17, 40),
)
def test_fair_first_token_in_a_flood_is_nearly_as_soon_as_idle(
    max_num_seqs, flood, num_steps, length, num_blocks
):
    """All rows and all blocks may be the flood's: 500 requests, each prompt within a step's budget."""
    limits = {"max_num_seqs": max_num_seqs, "num_gpu_blocks_override": num_blocks}
    prompt = list(range(length))
    idle = steps_to_first_token(engine_of("fair", **limits), "b", prompt, "other")
    engine = engine_of("fair", **limits)
    for number, (num_prompt, max_tokens) in zip(range(500), itertools.cycle(flood), strict=False):
        engine.add(f"a{number}", [number % 40] * num_prompt, max_tokens=max_tokens, tenant="flood")
    for _ in range(num_steps):
        engine.step()
    assert steps_to_first_token(engine, "b", prompt, "other") < 3 * idle


@pytest.mark.item(30)
def test_fair_preempted_requests_lose_no_token_and_a_flood_ends():
    engine = engine_of("fair")
    for number in range(100):
        engine.add(f"a{number}", [number % 40, 1, 2], max_tokens=1 + number % 24, tenant="flood")
    for number in range(20):
        engine.step()
        assert steps_to_first_token(engine, f"b{number}", [number, 7], f"newcomer {number}") == 1
    assert engine.scheduler.stats().num_preemptions
    engine.drain()
    for request in engine.requests.values():
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


def test_fair_starves_no_request_within_or_between_tenants():
    engine = engine_of("fair", fair_weights={"c": 5})
    traffic = Traffic(engine, *({"tenant": tenant} for tenant in "abcd"))
    traffic.step(60)
    waiting = unfinished(engine)
    while any(not request.is_finished for request in waiting):
        assert len(engine.plans) < 60 + 8 * num_tokens(waiting)
        traffic.step()


@pytest.mark.item(40)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@settings(max_examples=5, derandomize=True, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 24),
            st.integers(-2, 2),
            st.sampled_from("abc"),
            st.integers(0, 3),
        ),
        min_size=2,
        max_size=10,
    ),
    num_spare_blocks=st.integers(0, 3),
    threshold=st.sampled_from([0, 4]),
)
def test_small_pool_serves_all_requests(policy, requests, num_spare_blocks, threshold):
    """All end within the steps that they would take one after the other, each token on its own.

    More steps than that would mean that a step advanced nobody who is served first: a livelock.
    """
    engine = engine_of(
        policy,
        num_gpu_blocks_override=17 + num_spare_blocks,
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=8,
    )
    made = []
    for number, (length, max_tokens, priority, tenant, pause) in enumerate(requests):
        prompt = [number, *range(length - 1)]
        made.append(engine.add(str(number), prompt, max_tokens=max_tokens, priority=priority, tenant=tenant))
        for _ in range(pause):
            engine.step()
    engine.drain(max_steps=num_tokens(made))
    for request in made:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids
