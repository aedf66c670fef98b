# SPDX-License-Identifier: Apache-2.0
"""Each cause of waiting is reported, and the durations add up to the wait exactly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler.explain import Explanation
from quire.scheduler.request import RequestStatus
from quire.scheduler.wait_account import NUM_REMEMBERED
from tests.scheduler.harness import Engine, make_config

SECOND = 10**9


def explain(engine: Engine, name: str) -> Explanation:
    explanation = engine.scheduler.explain(name, engine.now)
    assert explanation is not None
    assert sum(share.duration_ns for share in explanation.shares) == explanation.waited_ns
    return explanation


def shares(engine: Engine, name: str) -> dict[str, int]:
    """Cause -> seconds; a step takes one, and a request that comes between two steps meets the next one a second on."""
    return {share.cause: share.duration_ns // SECOND for share in explain(engine, name).shares}


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_request_that_starts_at_once_waits_only_for_the_step():
    engine = Engine()
    engine.add("a", [1, 2])
    engine.step()
    assert (shares(engine, "a"), explain(engine, "a").cause) == ({"next_step": 1}, None)


def test_the_first_has_its_cause_and_the_others_wait_behind_it():
    engine = Engine(make_config(max_num_seqs=1))
    for name in "abc":
        engine.add(name, [1, 2], max_tokens=4)
    steps(engine, 3)
    assert shares(engine, "b") == {"next_step": 1, "sequence_cap": 2}
    assert shares(engine, "c") == {"next_step": 1, "behind": 2}
    assert [explain(engine, name).num_ahead for name in "abc"] == [0, 0, 1]
    steps(engine, 3)
    assert shares(engine, "b") == {"next_step": 1, "sequence_cap": 4}
    assert shares(engine, "c") == {"next_step": 1, "behind": 4, "sequence_cap": 1}
    engine.drain()


def test_token_budget():
    engine = Engine()
    engine.add("a", range(40))
    engine.add("b", range(3, 9))
    steps(engine, 3)
    assert shares(engine, "b") == {"next_step": 1, "token_budget": 2}


def test_cause_blocks_has_the_missing_number():
    engine = Engine(make_config(num_gpu_blocks_override=13, enable_prefix_caching=False))
    engine.add("a", range(16), max_tokens=16)
    engine.step()
    engine.add("b", range(33), max_tokens=4)
    steps(engine, 2)
    assert shares(engine, "b") == {"next_step": 1, "blocks": 1}
    assert "  1.000 s  for KV cache blocks, short by 2" in str(explain(engine, "b"))


def test_preempted_request_names_the_one_in_its_place():
    engine = Engine(make_config(num_gpu_blocks_override=7, enable_prefix_caching=False))
    for name in "ab":
        engine.add(name, range(8), max_tokens=12)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    engine.step()
    assert shares(engine, "b") == {"next_step": 1, "preempted": 1}
    assert "preempted by a" in str(explain(engine, "b"))
    assert explain(engine, "b").num_preemptions == 1


def test_lower_priority():
    engine = Engine(make_config(max_num_seqs=1, scheduling_policy="priority"))
    engine.add("running", [1], priority=-9, max_tokens=3)
    engine.add("low", [2], priority=5)
    steps(engine, 2)
    for name in ("high", "next"):
        engine.add(name, [3], max_tokens=4)
    steps(engine, 5)
    assert shares(engine, "low") == {"next_step": 1, "sequence_cap": 2, "behind": 1, "lower_priority": 3}


def test_fairness_debt():
    engine = Engine(make_config(max_num_seqs=1, scheduling_policy="fair"))
    for name in ("a0", "a1", "a2", "b0"):
        engine.add(name, [1, 2], tenant=name[0], max_tokens=4)
    steps(engine, 7)
    assert engine.requests["b0"].status is RequestStatus.RUNNING
    assert shares(engine, "a2")["fairness_debt"] == 2


def test_capped_prompt_is_explained_while_others_generate():
    engine = Engine(make_config(long_prefill_token_threshold=5))
    engine.add("a", [1], max_tokens=4)
    engine.step()
    engine.add("long", range(50), max_tokens=1)
    steps(engine, 4)
    assert shares(engine, "long") == {"next_step": 1, "long_prefill_cap": 3}
    steps(engine, 1)
    assert explain(engine, "long").cause is None


def test_the_ended_are_remembered_for_a_while():
    engine = Engine()
    engine.add("a", [1, 2], max_tokens=1)
    engine.add("b", [1, 2], max_tokens=40)
    engine.step()
    assert (explain(engine, "a").status, shares(engine, "a")) == ("finished", {"next_step": 1})
    for number in range(NUM_REMEMBERED):
        engine.add(f"r{number}", [1], max_tokens=1)
    engine.abort(*(f"r{number}" for number in range(NUM_REMEMBERED)))
    assert engine.scheduler.explain("a", engine.now) is None
    assert engine.scheduler.explain("unknown", engine.now) is None
    assert explain(engine, "b").status == "running"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    arrivals=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(-1, 1), st.sampled_from("ab")),
        max_size=12,
    ),
    aborted=st.sets(st.integers(0, 11)),
    threshold=st.sampled_from([0, 4]),
)
def test_the_shares_are_the_time_that_a_request_was_seen_waiting(policy, arrivals, aborted, threshold):
    """After each step everybody who waits, or whose prompt was cut, is noted for the second that follows."""
    engine = Engine(
        make_config(
            scheduling_policy=policy,
            num_gpu_blocks_override=17,
            max_num_seqs=3,
            priority_ageing_s=3.0,
            long_prefill_token_threshold=threshold,
        )
    )
    waited: dict[str, int] = {}
    for number, (length, max_tokens, priority, tenant) in enumerate(arrivals):
        fields = {"max_tokens": max_tokens, "priority": priority, "tenant": tenant}
        engine.add(str(number), [number, *range(length - 1)], **fields)
        waited[str(number)] = 1  # until the next step
        engine.step()
        if number in aborted:
            engine.abort(str(number))
        _note(engine, waited)
    while engine.scheduler.has_work():
        engine.step()
        _note(engine, waited)
    for name, num_seconds in waited.items():
        assert explain(engine, name).waited_ns == num_seconds * SECOND


def _note(engine: Engine, waited: dict[str, int]) -> None:
    scheduled = engine.plans[-1].num_scheduled_tokens
    for name, request in engine.requests.items():
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        threshold = engine.config.scheduler.long_prefill_token_threshold
        cut = threshold and not request.is_finished and scheduled.get(name) == threshold
        cut = cut and request.num_computed_tokens < request.num_tokens
        waited[name] += bool(waits or (cut and explain(engine, name).cause == "long_prefill_cap"))
