# SPDX-License-Identifier: Apache-2.0
"""Order of service, preemption by rank, and the shares of tenants; what holds for ever is in `test_waiting`."""

import itertools
from pathlib import Path

import pytest

from quire.scheduler.request import RequestStatus
from quire.scheduler.scheduler import POLICIES, resolve_scheduler
from tests.scheduler.harness import Engine, make_config, run_alone


def prompt(name: str, length: int = 8) -> list[int]:
    """Tokens that no other name's prompt begins with."""
    return [ord(name[0]) % 40, *range(length - 1)]


def starts(engine: Engine) -> list[str]:
    """Requests in the order in which they first started."""
    return list(dict.fromkeys(data.request_id for plan in engine.plans for data in plan.new_requests))


def assert_all_as_alone(engine: Engine) -> None:
    for name, request in engine.requests.items():
        assert engine.tokens(name) == run_alone(request, engine.config).new_token_ids


# Priority


def priority_engine(**changes) -> Engine:
    return Engine(make_config(**{"scheduling_policy": "priority", "max_num_seqs": 1, **changes}))


def test_lower_priority_value_starts_first_equals_by_arrival():
    engine = priority_engine()
    for name, priority in [("a", 2), ("b", 0), ("c", 2), ("d", -1), ("e", 0)]:
        engine.add(name, prompt(name), priority=priority)
    engine.drain()
    assert starts(engine) == ["d", "b", "e", "a", "c"]


@pytest.mark.parametrize(("ageing_s", "expected"), [(10.0, "bac"), (2.0, "abc"), (0.0, "bca")])
def test_waiting_raises_priority_every_ageing_s_seconds(ageing_s, expected):
    """a (priority 1) waits for 4 s before b (priority 0) comes, and for 16 before c."""
    engine = priority_engine(priority_ageing_s=ageing_s)
    engine.add("x", prompt("x"), max_tokens=26, priority=-100)
    engine.add("a", prompt("a"), priority=1)
    for _ in range(4):
        engine.step()
    engine.add("b", prompt("b"))
    for _ in range(12):
        engine.step()
    engine.add("c", prompt("c"))
    engine.drain()
    assert "".join(starts(engine)) == "x" + expected


@pytest.mark.parametrize("lack", ["rows", "blocks"])
def test_urgent_request_preempts_the_least_urgent_running_one(lack):
    limits = {"rows": {"max_num_seqs": 2}, "blocks": {"max_num_seqs": 4, "num_gpu_blocks_override": 10}}
    engine = priority_engine(**limits[lack])
    engine.add("a", prompt("a"), priority=1, max_tokens=20)
    engine.add("b", prompt("b"), priority=2, max_tokens=20)
    engine.step()
    engine.add("c", prompt("c", 16), max_tokens=2)
    plan = engine.step()
    assert plan.removed_request_ids == ["b"]
    assert [data.request_id for data in plan.new_requests] == ["c"]
    assert plan.num_scheduled_tokens.keys() == {"a", "c"}
    engine.drain()
    assert [engine.last(name).num_preemptions > 0 for name in "abc"] == [False, True, False]
    assert_all_as_alone(engine)


def test_request_that_would_still_not_fit_preempts_no_others():
    engine = priority_engine(max_num_seqs=4, num_gpu_blocks_override=17)
    engine.add("a", prompt("a", 32), priority=-5, max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.add("b", prompt("b"), priority=2, max_tokens=8)
    engine.step()
    engine.add("c", prompt("c", 40), max_tokens=4)
    engine.step()
    assert engine.requests["b"].status is RequestStatus.RUNNING
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0


def test_urgent_prompt_takes_the_budget_before_a_less_urgent_one():
    engine = priority_engine(max_num_seqs=4)
    engine.add("a", prompt("a", 60), priority=5, max_tokens=2)
    engine.step()
    engine.add("b", prompt("b", 12), max_tokens=2)
    assert engine.step().num_scheduled_tokens == {"b": 12, "a": 4}


# Fair


def fair_engine(**changes) -> Engine:
    return Engine(make_config(**{"scheduling_policy": "fair", "max_num_seqs": 1, **changes}))


def test_tenants_take_turns_however_many_requests_one_has():
    engine = fair_engine()
    for index in range(4):
        engine.add(f"a{index}", prompt("a"), tenant="a")
    for index in range(2):
        engine.add(f"b{index}", prompt("b"), tenant="b")
    engine.drain()
    assert starts(engine) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_cached_prompt_tokens_are_free_and_outputs_cost_more():
    engine = fair_engine(fair_input_token_weight=1.0, fair_output_token_weight=2.0)
    for name in "ab":
        engine.add(name, range(9), max_tokens=3, tenant=name)
        engine.drain()
    fair = engine.scheduler._queues.policy
    assert fair.counter("a") == 9 + 2 * 3
    assert fair.counter("b") - fair.counter("a") == 1 + 2 * 3  # lifted to a's, of 9 tokens 8 were cached


def test_weights_share_in_proportion():
    engine = fair_engine(fair_weights={"a": 3}, enable_prefix_caching=False)
    for index, tenant in itertools.product(range(30), "ab"):
        engine.add(f"{tenant}{index}", prompt(tenant), tenant=tenant)
    for _ in range(160):
        engine.step()
    first = starts(engine)
    assert len(first) == 20
    assert abs(sum(name.startswith("a") for name in first) - 15) <= 1


def test_idle_time_earns_no_credit():
    engine = fair_engine()
    engine.add("b0", prompt("b"), tenant="b")
    engine.drain()
    for index in range(5):
        engine.add(f"a{index}", prompt("a"), tenant="a")
    for _ in range(18):
        engine.step()
    for index in range(1, 4):
        engine.add(f"b{index}", prompt("b"), tenant="b")
    engine.drain()
    assert starts(engine)[4:] == ["b1", "a3", "b2", "a4", "b3"]


def test_two_waiting_tenants_get_nearly_equal_service():
    """Theorem 4.4: counters differ by at most the larger of the longest prompt and the tokens in flight."""
    engine = fair_engine(max_num_seqs=4, enable_prefix_caching=False)
    longest, in_flight = 30, 4 * (30 + 12)
    for index in range(40):
        engine.add(f"a{index}", prompt("a", 30), max_tokens=2, tenant="a")
        engine.add(f"b{index}", prompt("b", 3), max_tokens=12, tenant="b")
    fair = engine.scheduler._queues.policy
    while {request.tenant for request in fair} == {"a", "b"}:
        engine.step()
        assert abs(fair.counter("a") - fair.counter("b")) <= max(1.0 * longest, 2.0 * in_flight)
    assert min(fair.counter("a"), fair.counter("b")) > 300


def test_the_tenant_that_was_given_most_is_preempted_first():
    engine = fair_engine(max_num_seqs=4, num_gpu_blocks_override=13, enable_prefix_caching=False)
    for name, tenant in [("a0", "a"), ("a1", "a"), ("b0", "b")]:
        engine.add(name, prompt(tenant), max_tokens=24, tenant=tenant)
    while not engine.scheduler.stats().num_preemptions:
        plan = engine.step()
    assert plan.removed_request_ids == ["a1"]
    engine.drain()
    assert_all_as_alone(engine)


def test_newcomer_takes_one_of_many_places_but_not_an_only_one():
    engine = fair_engine(max_num_seqs=3)
    for name in ("a0", "a1", "b0"):
        engine.add(name, prompt(name[0]), max_tokens=20, tenant=name[0])
        engine.step()
    engine.add("c0", prompt("c"), max_tokens=20, tenant="c")
    plan = engine.step()
    assert (plan.removed_request_ids, starts(engine)[-1]) == (["a1"], "c0")
    engine.add("d0", prompt("d"), max_tokens=20, tenant="d")
    for _ in range(5):
        assert not engine.step().removed_request_ids
    assert engine.scheduler.explain("d0", 0.0).cause == "sequence_cap"
    engine.drain()
    assert_all_as_alone(engine)


def test_newcomer_that_would_still_not_fit_preempts_no_others():
    engine = fair_engine(max_num_seqs=4, num_gpu_blocks_override=17, enable_prefix_caching=False)
    engine.add("a0", prompt("a", 15), max_tokens=30, tenant="a")
    engine.add("a1", prompt("b", 3), max_tokens=30, tenant="a")
    engine.step()
    engine.step()
    engine.add("c0", prompt("c", 54), max_tokens=2, tenant="c")
    assert not engine.step().removed_request_ids
    engine.drain()
    assert_all_as_alone(engine)


@pytest.mark.parametrize("num_steps", [3, 6, 9])
def test_tenants_of_the_past_are_forgotten_without_a_trace(monkeypatch, num_steps):
    """`num_steps` between requests: the queue is long, short, empty."""

    def run(num_to_sweep: int) -> Engine:
        monkeypatch.setattr("quire.scheduler.fair.MIN_TENANTS_TO_SWEEP", num_to_sweep)
        engine = fair_engine()
        for index in range(60):
            tenant = f"t{index % 7}" if index % 2 else f"stranger {index}"
            engine.add(str(index), [index % 40, 1, 2], max_tokens=1 + index % 8, tenant=tenant)
            for _ in range(num_steps):
                engine.step()
        engine.drain()
        return engine

    forgetful, faithful = run(1), run(1000)
    assert forgetful.plans == faithful.plans
    assert (
        len(forgetful.scheduler._queues.policy._tenants)
        < len(faithful.scheduler._queues.policy._tenants)
        == 37
    )


# Long prompts


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_leaves_the_generating_requests_their_step(policy):
    engine = Engine(make_config(scheduling_policy=policy, long_prefill_token_threshold=5))
    for name in "ab":
        engine.add(name, prompt(name), max_tokens=20)
    engine.step()
    engine.add("long", prompt("l", 30), max_tokens=2)
    for _ in range(6):
        assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "long": 5}
    engine.drain()
    assert_all_as_alone(engine)


def test_a_long_prompt_without_company_is_not_capped():
    engine = Engine(make_config(long_prefill_token_threshold=5))
    engine.add("long", prompt("l", 30), max_tokens=2)
    assert engine.step().num_scheduled_tokens == {"long": 16}


def test_short_prompts_start_beside_a_capped_one():
    engine = Engine(make_config(long_prefill_token_threshold=5))
    engine.add("a", prompt("a"))
    engine.step()
    engine.add("long", prompt("l", 30))
    engine.add("short", prompt("s", 6))
    assert engine.step().num_scheduled_tokens == {"a": 1, "long": 5, "short": 5}


def test_blocks_for_the_rest_of_a_capped_prompt_stay_reserved():
    engine = Engine(make_config(long_prefill_token_threshold=5, num_gpu_blocks_override=16))
    engine.add("a", prompt("a", 4), max_tokens=16)
    engine.step()
    engine.add("long", prompt("l", 40), max_tokens=4)
    engine.add("short", prompt("s", 16), max_tokens=4)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0


# A policy of the user's


def test_the_documented_policy_needs_no_more_than_a_rank(monkeypatch, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    (tmp_path / "mine.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tests.scheduler.harness.Scheduler", resolve_scheduler("mine:MyScheduler"))
    engine = Engine(make_config(max_num_seqs=1))
    for name, length in [("a", 9), ("b", 7), ("c", 8)]:
        engine.add(name, prompt(name, length))
    engine.drain()
    assert starts(engine) == ["b", "c", "a"]
